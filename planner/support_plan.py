"""Whether a model's plan can be written for each target and run here: found by trying it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from flopwright.errors import InputError
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.registry import TARGETS, target_files
from flopwright.simulator.hardware.nodes.types import cluster_of, usual_node_type
from flopwright.spec.base import Spec
from flopwright.spec.load import load_cluster, load_model, make_plan_file
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import LearningRate, Workload

# Where nothing else is asked about.
_MODEL: Final = "llama31_8b"
_GPU: Final = "h100_sxm"
_IMAGE: Final = "registry/image:tag"

# From a plan to (what the executor refuses of it, fields of which it refuses some values). The
# planner does not know the executor: who asks brings its rules.
Judge = Callable[[PlanFile], tuple[Collection[str], Collection[str]]]


class Target(Spec):
    """An export target.

    Attributes:
        plan: the plan that it took; refused: what it cannot express of every plan tried.
    """

    name: str
    works: bool
    plan: str = ""
    refused: str = ""


class Runs(Spec):
    """Whether `flopwright run` takes the model's simplest plan.

    Attributes:
        refused: what it does not run of that plan; fields: plan fields of which it refuses
            some values.
    """

    works: bool
    refused: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()


def simplest_plan(spec: ModelSpec | None, gpu: str | None, zero_stage: int = 1) -> PlanFile:
    """Returns one node's plan with data parallelism alone, bf16 and AdamW."""
    model = spec or load_model(_MODEL)
    name = gpu or _GPU
    try:
        cluster = cluster_of(usual_node_type(name), usual_node_type(name).node.gpus)
    except InputError:
        cluster = load_cluster("8_h100")
    gpus = cluster.num_gpus
    seq_len = min(4096, model.max_seq_len)
    workload = Workload(
        seq_len=seq_len,
        global_batch_size=8 * gpus,
        total_tokens=1000 * 8 * gpus * seq_len,
        learning_rate=LearningRate(warmup_steps=10),
    )
    scenario = Scenario(name="support", model=model, cluster=cluster, workload=workload)
    plan = ParallelPlan(dp_shard=gpus, zero_stage=zero_stage, micro_batch_size=1)
    return make_plan_file(scenario, plan, "support")


def target_states(spec: ModelSpec | None, gpu: str | None) -> tuple[Target, ...]:
    """Returns for every export target whether it takes the model's simplest plan.

    With a sharded optimizer (ZeRO-1), or with everything sharded (ZeRO-3).
    """
    plans = [simplest_plan(spec, gpu, zero_stage) for zero_stage in (1, 3)]
    return tuple(_target(plans, name) for name in sorted(TARGETS))


def _target(plans: list[PlanFile], name: str) -> Target:
    refused = []
    for plan in plans:
        try:
            target_files(plan, [name], image=_IMAGE)
        except InputError as error:
            refused.append("; ".join(str(v) for v in error.violations))
            continue
        return Target(name=name, works=True, plan=plan.parallel.label())
    return Target(name=name, works=False, refused=refused[-1])


def executor_runs(spec: ModelSpec | None, gpu: str | None, judge: Judge) -> Runs:
    """Returns whether `flopwright run` takes the model's simplest plan, as `judge` says."""
    refused, fields = judge(simplest_plan(spec, gpu))
    return Runs(works=not refused, refused=tuple(refused), fields=tuple(sorted(fields)))
