"""In words: whether a scenario fits, what binds the best plan, why the next ones lose."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.result import InfeasiblePlan, RankedPlan, SearchResult
from flopwright.planner.sensitivity import sensitivities
from flopwright.report.metrics import StepMetrics
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes, show_seconds

Objective = Literal["time", "cost"]

# A plan that lacks memory and is faster by less than this is no reason to call memory binding.
_MEMORY_GAIN: Final = 0.02
# Differences below this share of the step are not reasons.
_NOTICEABLE: Final = 0.001
_CLASS_WORDS: Final = {
    "forward": "forward compute",
    "backward": "backward compute",
    "recompute": "recomputation",
    "tp_comm": "tensor-parallel communication",
    "ep_comm": "expert exchange",
    "pp_comm": "pipeline transfers",
    "dp_comm": "gradient reduction and weight gathering",
    "offload": "transfers to host memory",
    "optimizer": "optimizer",
    "idle": "pipeline bubble and waiting",
}


class Binding(Spec):
    """What limits the best plan.

    Attributes:
        kind: "memory", "bubble" or a resource of planner.sensitivity.
        share: of the step that would go without the limit.
    """

    kind: str
    share: float
    text: str


def verdict_text(result: SearchResult, scenario: Scenario) -> str:
    """Returns the verdict in one line."""
    cluster = scenario.cluster
    where = f"{scenario.model.name} on {cluster.num_gpus:,} x {cluster.node.gpu.name}"
    how = "exhaustive" if result.proved else "all priced, the best by bound replayed"
    counts = f"{how}: {result.candidates:,} candidates, {result.fit:,} fit"
    best = result.best
    if best is None:
        lacking = result.infeasible[0] if result.infeasible else None
        need = "" if lacking is None else f": {_lack_text(lacking)}"
        return f"does not fit: {where}{need} ({counts})"
    if result.verdict == "tight":
        asked = 100 * result.headroom_asked
        return (
            f"fits with less than {asked:.3g} % headroom: {where}, "
            f"{100 * best.headroom:.2g} % of its memory free ({counts})"
        )
    return f"fits: {where}, {100 * best.headroom:.2g} % of its memory free ({counts})"


def _lack_text(plan: InfeasiblePlan) -> str:
    if plan.missing_bytes == 0:
        return f"the nearest plan ({plan.plan.label()}) lacks host memory"
    return (
        f"the nearest plan ({plan.plan.label()}) lacks "
        f"{show_bytes(plan.missing_bytes)} on stage {plan.stage}"
    )


def binding_constraint(
    result: SearchResult, scenario: Scenario, calibration: Calibration | None = None
) -> tuple[Binding, ...]:
    """Returns what limits the best plan, the strongest first; empty where nothing fits.

    The shares are comparable: each is about how much of the step would go if the limit did.
    Memory: a plan that lacks only memory is that much faster (less than 2 % is left out).
    Bubble: idle time. The rest: each resource a tenth better, the plan priced again.
    """
    best = result.best
    if best is None:
        return ()
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    metrics = best.prediction.metrics
    found = [_bubble(metrics)]
    for name, share in sensitivities(scenario, best.plan, calibration).items():
        text = f"{100 * share:.0f} % of the step scales with {name}"
        found.append(Binding(kind=name, share=round(share, 6), text=text))
    memory = _memory(result, best, scenario.objective)
    if memory is not None:
        found.append(memory)
    return tuple(sorted(found, key=lambda b: (-b.share, b.kind)))


def _bubble(metrics: StepMetrics) -> Binding:
    share = metrics.time_s.get("idle", 0.0) / metrics.step_time_s
    return Binding(
        kind="bubble",
        share=round(share, 6),
        text=f"{100 * share:.0f} % of the step is pipeline bubble and waiting",
    )


def _memory(result: SearchResult, best: RankedPlan, objective: Objective) -> Binding | None:
    metrics = best.prediction.metrics
    mine = _value(best.plan, metrics.step_time_s, objective)
    values = [(_value(p.plan, p.step_time_s, objective), p) for p in result.infeasible]
    better = [(v, p) for v, p in values if v < mine * (1 - _MEMORY_GAIN)]
    if not better:
        return None
    value, first = min(better, key=lambda pair: pair[0])
    gain = 1 - value / mine
    lacks = show_bytes(first.missing_bytes) if first.missing_bytes else "host memory"
    return Binding(
        kind="memory",
        share=round(gain, 6),
        text=(
            f"{first.plan.label()} would be {100 * gain:.0f} % "
            f"{'faster' if objective == 'time' else 'cheaper'} but lacks {lacks} "
            f"on stage {first.stage} (largest class of the best plan: {largest_class(metrics)})"
        ),
    )


def _value(plan: ParallelPlan, step_time_s: float, objective: Objective) -> float:
    """Returns what is minimised: seconds, or GPU-seconds for cost."""
    return step_time_s * (plan.world_size if objective == "cost" else 1)


def largest_class(metrics: StepMetrics) -> str:
    """Returns the memory class that takes most of the fullest stage; "" where unknown."""
    if not metrics.memory_bytes:
        return ""
    fullest = max(metrics.memory_bytes, key=lambda m: sum(m.values()))
    return max(fullest, key=lambda k: (fullest[k], k))


def why_it_loses(best: RankedPlan, other: RankedPlan, objective: Objective = "time") -> str:
    """Returns how far `other` is behind `best`, and the time classes that grew most.

    For cost, times are GPU-seconds, as if on the best plan's GPUs.
    """
    gpus = _value(other.plan, 1.0, objective) / _value(best.plan, 1.0, objective)
    a, b = best.prediction.metrics, other.prediction.metrics
    behind = gpus * b.step_time_s / a.step_time_s - 1
    grown = _differences(a.time_s, {k: gpus * v for k, v in b.time_s.items()})
    least = _NOTICEABLE * a.step_time_s
    costs = [f"{_CLASS_WORDS[k]} +{show_seconds(d)}" for k, d in grown if d > least][:2]
    because = f": {', '.join(costs)}" if costs and behind > 0 else ""
    return f"{100 * behind:+.1f} %{because}"


def _differences(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[str, float]]:
    classes = [k for k in _CLASS_WORDS if k in a or k in b]
    pairs = [(k, b.get(k, 0.0) - a.get(k, 0.0)) for k in classes]
    return sorted(pairs, key=lambda p: (-p[1], p[0]))
