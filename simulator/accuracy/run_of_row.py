"""Published measurements as runs that can be predicted: scenario, plan, measured value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.simulator.accuracy.defaults import (
    Assumed,
    is_quantized,
    lora_rank,
    lora_targets,
    offloads_of,
    precision_of,
    recompute_of,
    sequence_parallel_of,
    sharding_of,
    shards_weights,
)
from flopwright.simulator.accuracy.defaults_physics import (
    beats_the_peak,
    settled_recompute,
)
from flopwright.simulator.accuracy.gpu_names import canonical_gpu, is_out_of_scope
from flopwright.simulator.accuracy.model_of_row import RowModel, model_of
from flopwright.simulator.accuracy.rows import (
    Configuration,
    has_speed,
    memory_by_definition,
    read_configurations,
    step_seconds,
)
from flopwright.simulator.accuracy.run_of_row_axes import Axes, axes_of
from flopwright.simulator.accuracy.run_of_row_cluster import cluster_of_row
from flopwright.simulator.accuracy.run_of_row_flags import is_composed, place, set_flags
from flopwright.simulator.accuracy.run_of_row_merge import merge, source_family
from flopwright.simulator.accuracy.stack_of_row import StackKey, stack_of
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

# Runs with one of these are reported apart.
APART: Final = frozenset({"vtrain-single", "odd", "own-plan", "tp-across-nodes", "unaligned"})
_STEPS: Final = 1000
_USUAL_SEQ: Final = 2048

# Returns a plan for a scenario, given the axes that a row states; None where it has none.
PlanFor = Callable[[Scenario, Mapping[str, int]], ParallelPlan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """A published run.

    Attributes:
        id: what its rows' ids share; `row_ids` names all rows, those of merged repeats too.
        source: who published it, without version and file.
        gpu: catalog name of its processor.
        stack: its software.
        cell: key of its (source, model family, GPU), whatever the spelling, metric or depth.
        sweep: key of the runs that differ from it in their plan only.
        measured_step_s: seconds of one optimizer step; None where only memory was measured.
        memory: bytes by definition (rows.memory_by_definition).
        assumed: what the rows did not say, one sentence each.
        flags: what is special about it.
        framework: its software as its rows spell it; year: of publication; notes: what the
            rows say beside their columns.
    """

    id: str
    row_ids: tuple[str, ...]
    source: str
    model_name: str
    gpu: str
    stack: StackKey
    cell: str
    scenario: Scenario
    plan: ParallelPlan
    num_gpus: int
    measured_step_s: float | None = None
    memory: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    flags: frozenset[str] = frozenset()
    sweep: str = ""
    metric: str = ""
    where: str = ""
    framework: str = ""
    year: int | None = None
    notes: str = ""

    @property
    def in_overall(self) -> bool:
        """Whether it counts in the headline: measured in time, and nothing sets it apart."""
        return self.measured_step_s is not None and not self.flags & APART


@dataclass(frozen=True, slots=True)
class PublishedRuns:
    """The runs of a file, and the rows that gave none, each with the reason.

    A reason that starts with "out of scope" is of rows that are not judged at all.
    """

    runs: tuple[PublishedRun, ...]
    skipped: tuple[tuple[str, str], ...]


def published_runs(path: Path, plan_for: PlanFor | None = None) -> PublishedRuns:
    """Returns the runs of a file of measured rows, one a configuration.

    Args:
        plan_for: the planner's plan for rows that lack tp, pp, micro-batch or batch; without
            it they get simple defaults. Either is flagged "own-plan".

    Raises:
        InputError: no such file, or not one of measured rows.
    """
    configurations, unread = read_configurations(path)
    skipped = list(unread)
    runs: list[tuple[Configuration, PublishedRun]] = []
    for configuration in configurations:
        reason = _out_of_scope(configuration)
        if reason is None:
            try:
                runs.append((configuration, run_of(configuration, plan_for)))
                continue
            except (InputError, ArithmeticError, ValueError) as error:
                reason = _reason(error)
        skipped.extend((row, reason) for row in configuration.row_ids)
    return PublishedRuns(merge(runs), tuple(skipped))


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, e['loc']))} ({e['input']}): {e['msg']}" for e in error.errors()
        )
    return " ".join(str(error).split())


def _out_of_scope(configuration: Configuration) -> str | None:
    gpu = configuration.text("gpu")
    if is_out_of_scope(gpu):
        return f"out of scope: runs on {gpu} are not judged"
    if configuration.value("forward_ms") is not None:
        return "out of scope: a microbenchmark of a part of a step"
    if not has_speed(configuration) and not memory_by_definition(configuration):
        names = ", ".join(sorted({m.name for m in configuration.metrics}))
        return f"out of scope: neither a step time nor a memory peak ({names})"
    return None


def run_of(configuration: Configuration, plan_for: PlanFor | None = None) -> PublishedRun:
    """Returns the run of one configuration.

    Raises:
        InputError: what keeps it from being one.
    """
    gpu = canonical_gpu(configuration.text("gpu"))
    if gpu is None:
        raise _bad("gpu", configuration.text("gpu"), "no such processor is known")
    assumed = Assumed()
    seq_len = configuration.whole("seq")
    if seq_len is None:
        if configuration.value("step_time") is not None:
            raise _bad("seq", "", "a step time without its sequence length says nothing")
        seq_len = _USUAL_SEQ
        assumed.say(f"sequence length {seq_len}")
        assumed.flags.add("no-seq")
    model = model_of(configuration, seq_len)
    assumed.made += model.assumed
    stack = stack_of(configuration, model.spec.moe is not None, gpu)
    sharded = shards_weights(configuration, stack)
    axes = axes_of(configuration, model.spec, gpu, sharded, assumed)
    scenario = _scenario(configuration, model, stack, gpu, axes, assumed)
    plan = _plan(configuration, scenario, stack, axes, assumed)
    if "own-plan" in assumed.flags and not axes.sharded and plan_for is not None:
        plan = _own_plan(configuration, scenario, plan, axes, plan_for, assumed)
    broken = plan_violations(plan, scenario)
    if broken:
        raise InputError(list(broken))
    measured = _measured(configuration, scenario, axes.num_gpus)
    if not configuration.text("recompute"):
        memory = memory_by_definition(configuration)
        plan = settled_recompute(
            scenario, plan, stack.framework, measured[0] if measured else None, memory, assumed
        )
    if measured and beats_the_peak(scenario, plan, measured[0]):
        assumed.flags.add("odd")
        assumed.say("set apart: as read, it would beat the processor's peak")
    return _run(configuration, gpu, model, stack, scenario, plan, axes, assumed)


def _measured(
    configuration: Configuration, scenario: Scenario, num_gpus: int
) -> tuple[float, str] | None:
    """Returns (seconds of a step, the metric they follow from)."""
    work = scenario.workload
    return step_seconds(configuration, work.tokens_per_step, work.global_batch_size, num_gpus)


def _bad(name: str, value: str, rule: str) -> InputError:
    return InputError(Violation(field=name, value=repr(value), rule=rule))


def _scenario(
    configuration: Configuration,
    model: RowModel,
    stack: StackKey,
    gpu: str,
    axes: Axes,
    assumed: Assumed,
) -> Scenario:
    cluster, said = cluster_of_row(configuration, gpu, axes.num_gpus)
    for words in said:
        assumed.say(words)
    rank = lora_rank(configuration)
    if rank is not None:
        assumed.flags.add("lora")
        assumed.say(f"adapters beside {lora_targets(stack)} matrices, as its recipes have")
        if is_quantized(configuration):
            assumed.flags.add("qlora")
    workload: dict[str, Any] = {
        "seq_len": axes.seq_len,
        "global_batch_size": axes.global_batch_size,
        "total_tokens": axes.seq_len * axes.global_batch_size * _STEPS,
        "precision": precision_of(configuration, stack, gpu, rank is not None, assumed),
        "lora_rank": rank,
        "lora_targets": "all" if rank is None else lora_targets(stack),
    }
    if model.family.startswith("kimik2"):
        workload["optimizer"] = {"kind": "muon"}
        assumed.say("the Muon optimizer, which the model was trained with")
    if re.search(r"token.?drop", configuration.notes.lower()):
        workload["expert_load"] = {"kind": "capacity"}
    return Scenario(
        name=re.sub(r"[^A-Za-z0-9_.-]+", "_", configuration.id),
        model=model.spec,
        cluster=cluster,
        workload=Workload.model_validate(workload),
    )


def _plan(
    configuration: Configuration,
    scenario: Scenario,
    stack: StackKey,
    axes: Axes,
    assumed: Assumed,
) -> ParallelPlan:
    recompute, tags, half = recompute_of(configuration, stack, assumed)
    if is_composed(configuration):
        recompute, tags, half = "none", (), False
        assumed.say("no recompute: with it the rows would beat the processor's peak")
    layers = -(-scenario.model.num_layers // axes.num_chunks)
    return ParallelPlan(
        tp=axes.tp,
        pp=axes.pp,
        vpp=axes.vpp,
        cp=axes.cp,
        ep=axes.ep,
        etp=axes.etp,
        micro_batch_size=axes.micro_batch_size,
        schedule="interleaved_1f1b" if axes.vpp > 1 else "1f1b",
        layers_per_stage=axes.layers_per_stage,
        recompute=recompute,
        recompute_tags=tags,
        recompute_layers=layers // 2 if half else None,
        sequence_parallel=sequence_parallel_of(configuration, stack, assumed),
        context_parallel="ulysses" if "ulysses" in place(configuration) else "ring",
        **sharding_of(configuration, stack, axes.dp, assumed),
        **offloads_of(configuration),
    )


def _own_plan(
    configuration: Configuration,
    scenario: Scenario,
    plan: ParallelPlan,
    axes: Axes,
    plan_for: PlanFor,
    assumed: Assumed,
) -> ParallelPlan:
    found = plan_for(scenario, axes.known)
    if found is None:
        assumed.say("no plan of the planner's fits: simple defaults")
        return plan
    # What the row says, or its framework does unless told otherwise, is not the planner's to say.
    if configuration.text("recompute") or plan.recompute != "none":
        stated = ("recompute", "recompute_tags", "recompute_layers")
        found = found.model_copy(update={name: getattr(plan, name) for name in stated})
    assumed.replace("tp ", f"the planner's own plan: {found.label()}")
    return found


def _run(
    configuration: Configuration,
    gpu: str,
    model: RowModel,
    stack: StackKey,
    scenario: Scenario,
    plan: ParallelPlan,
    axes: Axes,
    assumed: Assumed,
) -> PublishedRun:
    work = scenario.workload
    measured = _measured(configuration, scenario, axes.num_gpus)
    set_flags(configuration, gpu, model, scenario, plan, assumed)
    source = source_family(configuration)
    family = model.family + ("+lora" if "lora" in assumed.flags else "")
    sweep = (
        source, family, scenario.model.name, gpu, axes.num_gpus, work.global_batch_size,
        work.seq_len, work.precision.compute, work.precision.gemm,
    )  # fmt: skip
    return PublishedRun(
        id=configuration.id,
        row_ids=configuration.row_ids,
        source=source,
        model_name=family,
        gpu=gpu,
        stack=stack,
        cell=f"{source} | {family} | {gpu}",
        scenario=scenario,
        plan=plan,
        num_gpus=axes.num_gpus,
        measured_step_s=measured[0] if measured else None,
        metric=measured[1] if measured else "",
        memory=memory_by_definition(configuration),
        assumed=tuple(assumed.made),
        flags=frozenset(assumed.flags),
        sweep=" | ".join(map(str, sweep)),
        where=configuration.text("source"),
        framework=configuration.text("framework"),
        year=configuration.whole("year"),
        notes=configuration.notes,
    )
