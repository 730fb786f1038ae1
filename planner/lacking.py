"""What a plan that does not fit lacks: by memory class, and how many more GPUs would hold it."""

from __future__ import annotations

from typing import Any, Final

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.bounds import bounds
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.scenario import Scenario
from flopwright.units import plural, show_bytes, show_seconds

# Clusters that are tried: so many times as large.
_TIMES: Final = (2, 4, 8, 16, 32)
_TOLD: Final = 3


def memory_of_stage(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration, stage: int
) -> tuple[dict[str, int], int]:
    """Returns (bytes by class on a GPU of a stage, host bytes that a node needs)."""
    found = evaluate(scenario, Candidates.from_plans((plan,)), calibration)
    classes = {k: int(v[stage, 0]) for k, v in found.memory_bytes.items() if v[stage, 0]}
    return classes, int(found.host_bytes[0])


def largest_classes(classes: dict[str, int]) -> str:
    """Returns the classes that take most, in words."""
    ranked = sorted(classes.items(), key=lambda kv: (-kv[1], kv[0]))[:_TOLD]
    return ", ".join(f"{show_bytes(v)} {k.replace('_', ' ')}" for k, v in ranked)


def more_gpus(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> str:
    """Returns the smallest multiple of the cluster that holds the plan, grown on one axis.

    Grown are data-parallel ranks (with their shards), stages, expert or tensor ranks.
    """
    for times in _TIMES:
        nodes = scenario.cluster.num_nodes * times
        larger = scenario.cluster.model_copy(update={"num_nodes": nodes})
        grown = scenario.model_copy(update={"cluster": larger})
        found = _fitting(grown, _grown(plan, times), calibration)
        if found is not None:
            what, step_s = found
            gpus = plural(larger.num_gpus, "GPU")
            return f"{gpus} ({times} times as many), {what}: fits at {show_seconds(step_s)} a step"
    return f"not even {_TIMES[-1]} times as many GPUs hold it, grown on one axis"


def _grown(plan: ParallelPlan, times: int) -> dict[str, ParallelPlan]:
    """Returns the plan on so many times its ranks, by what changes."""
    zero = max(plan.zero_stage, 1)
    more: dict[str, Any] = {"dp_shard": plan.dp_shard * times, "zero_stage": zero}
    changes: dict[str, dict[str, Any]] = {
        f"dp {plan.dp * times} zero_stage {zero}": more,
        f"ep {plan.ep * times}": more | {"ep": plan.ep * times},
        f"pp {plan.pp * times}": {"pp": plan.pp * times, "layers_per_stage": None},
        f"tp {plan.tp * times}": {"tp": plan.tp * times},
    }
    return {what: plan.model_copy(update=update) for what, update in changes.items()}


def _fitting(
    scenario: Scenario, plans: dict[str, ParallelPlan], calibration: Calibration
) -> tuple[str, float] | None:
    """Returns (what changes, step seconds) of the fastest plan that fits, None without one."""
    legal = {what: p for what, p in plans.items() if not plan_violations(p, scenario)}
    if not legal:
        return None
    try:
        found = bounds(scenario, Candidates.from_plans(legal.values()), calibration)
    except InputError:
        return None
    node = scenario.cluster.node
    fits = (found.peak_bytes <= node.gpu.hbm_bytes) & (found.host_bytes <= node.host_bytes)
    ranked = sorted(
        (float(step), what)
        for what, step, holds in zip(legal, found.step_time_s, fits, strict=True)
        if holds
    )
    return (ranked[0][1], ranked[0][0]) if ranked else None
