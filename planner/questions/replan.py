"""Variants of a plan, priced: the one way in which every question gets its numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from flopwright.errors import Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.constraints import RULES, violations
from flopwright.planner.exact import replayed_step_times
from flopwright.planner.questions.answer import Replan
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.scenario import Scenario

AS_PLANNED: Final = "as planned"
# Rules of the search's taste, not of what can run: a variant may leave GPUs idle.
_TASTE: Final = frozenset(
    r.reason for r in RULES if r.name in {"all_gpus", "fp8_stores_something"}
)
Changes = Mapping[str, Any]


def changed(plan: ParallelPlan, changes: Changes) -> ParallelPlan:
    """Returns the plan with some fields replaced; what only they gave meaning to goes.

    A split of layers goes with another number of chunks, a list of recompute groups or a
    depth with another policy, sharding with the ranks to shard over, offloaded shards with
    what made them shards.
    """
    values = plan.model_dump() | dict(changes)
    if values["pp"] * values["vpp"] != plan.num_chunks and "layers_per_stage" not in changes:
        values["layers_per_stage"] = None
    if values["dp_shard"] * values["cp"] == 1 and "zero_stage" not in changes:
        values["zero_stage"] = 0
    if values["recompute"] != "selective":
        values["recompute_tags"] = ()
    if values["recompute"] != "full":
        values["recompute_layers"] = None
    if values["zero_stage"] < 2 or not values["optimizer_offload"]:
        values["gradient_offload"] = False
    if values["zero_stage"] < 3:
        values["parameter_offload"] = False
    return ParallelPlan(**values)


def rules_broken(plan: ParallelPlan, scenario: Scenario) -> tuple[Violation, ...]:
    """Returns why a plan cannot run; idle GPUs are no reason."""
    return tuple(v for v in violations(plan, scenario) if v.rule not in _TASTE)


def replans(
    scenario: Scenario,
    variants: Sequence[tuple[str, ParallelPlan]],
    calibration: Calibration,
) -> tuple[Replan, ...]:
    """Returns each variant (what changed, plan) priced: step replayed, memory, whether it fits."""
    broken = [rules_broken(plan, scenario) for _, plan in variants]
    legal = [i for i, found in enumerate(broken) if not found]
    out = [
        Replan(change=change, plan=plan, violations=found)
        for (change, plan), found in zip(variants, broken, strict=True)
    ]
    if not legal:
        return tuple(out)
    candidates = Candidates.from_plans(variants[i][1] for i in legal)
    found = evaluate(scenario, candidates, calibration)
    seconds = replayed_step_times(scenario, candidates, calibration)
    node, tokens = scenario.cluster.node, scenario.workload.tokens_per_step
    for column, i in enumerate(legal):
        total = sum(found.memory_bytes.values())
        stage = int(np.argmax(np.asarray(total)[:, column]))
        peak, host = int(found.peak_bytes[column]), int(found.host_bytes[column])
        step_s = float(seconds[column])
        out[i] = out[i].model_copy(
            update={
                "step_time_s": step_s,
                "tokens_per_s_per_gpu": tokens / step_s / out[i].plan.world_size,
                "peak_memory_bytes": peak,
                "memory_bytes": {
                    name: int(values[stage, column]) for name, values in found.memory_bytes.items()
                },
                "stage": stage,
                "host_memory_bytes": host,
                "fits": peak <= node.gpu.hbm_bytes and host <= node.host_bytes,
            }
        )
    return tuple(out)


def replan(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration, change: str = AS_PLANNED
) -> Replan:
    """Returns one plan priced."""
    return replans(scenario, [(change, plan)], calibration)[0]


def around(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    changes: Iterable[tuple[str, Changes]],
) -> tuple[Replan, ...]:
    """Returns the plan itself, priced, and behind it each change of some of its fields.

    A change that makes no other plan is left out.
    """
    variants = {plan: AS_PLANNED}
    for words, fields in changes:
        variants.setdefault(changed(plan, fields), words)
    return replans(scenario, [(words, p) for p, words in variants.items()], calibration)


def fastest(found: Iterable[Replan]) -> Replan | None:
    """Returns the usable one with the shortest step (the first of equals), None without any."""
    usable = [r for r in found if r.usable]
    return min(usable, key=lambda r: r.priced_s) if usable else None


def with_hbm(scenario: Scenario, hbm_bytes: int) -> Scenario:
    """Returns the scenario on GPUs with that much memory."""
    node = scenario.cluster.node
    gpu = node.gpu.model_copy(update={"hbm_bytes": hbm_bytes})
    return _on(scenario, {"node": node.model_copy(update={"gpu": gpu})})


def with_nodes(scenario: Scenario, num_nodes: int) -> Scenario:
    """Returns the scenario on so many of its nodes."""
    return _on(scenario, {"num_nodes": num_nodes})


def with_workload(scenario: Scenario, **changes: Any) -> Scenario:
    """Returns the scenario with some fields of its workload replaced."""
    return scenario.model_copy(
        update={"workload": scenario.workload.model_copy(update=dict(changes))}
    )


def _on(scenario: Scenario, changes: dict[str, Any]) -> Scenario:
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update=changes)})


def with_gpus(scenario: Scenario, gpus: int) -> Scenario:
    """Returns the scenario on at least so many GPUs: more nodes, or a larger lone node."""
    cluster = scenario.cluster
    if gpus <= cluster.num_gpus:
        return scenario
    if cluster.network is None:
        return _on(scenario, {"node": cluster.node.model_copy(update={"gpus": gpus})})
    return with_nodes(scenario, -(-gpus // cluster.node.gpus))
