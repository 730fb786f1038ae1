"""In words: whether a scenario fits, what binds the best plan, why the next ones lose."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.result import InfeasiblePlan, RankedPlan, SearchResult
from flopwright.planner.sensitivity import STEP, Sensitivity, sensitivities
from flopwright.report.metrics import StepMetrics
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Objective, Scenario
from flopwright.units import plural, show_bytes, show_percent, show_seconds

# A plan that lacks memory and is faster by less than this is no reason to call memory binding.
_MEMORY_GAIN: Final = 0.02
# Objectives that count a step once a GPU.
_PAID: Final[frozenset[Objective]] = frozenset({"cost", "energy"})
# Differences below this share of the step are not reasons.
_NOTICEABLE: Final = 0.001
_WORTH_TELLING: Final = 0.01
_BETTER: Final = {
    "memory bandwidth": "{tenth} more memory bandwidth",
    "launch floor": "{tenth} faster kernel launches",
}
# The parts of ParallelPlan.label, in its order.
_PARTS: Final = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "vpp": "runs of layers a stage",
    "cp": "context-parallel ranks",
    "ep": "expert-parallel ranks",
    "gpipe": "all forwards before any backward",
    "zbh1": "ZB-H1: weight gradients fill the bubble",
    "zbv": "ZB-V: a V of two runs of layers a stage, weight gradients fill the bubble",
    "dualpipev": "DualPipe-V: a V of two runs of layers a stage, forwards beside backwards",
    "epoverlap": "expert exchanges behind the compute of another micro-batch",
    "dp": "data-parallel ranks",
    "zero": "ZeRO stage",
    "mbs": "sequences a micro-batch",
    "selective": "cheap activations recomputed",
    "full": "every layer recomputed",
    "fp8act": "activations kept in FP8",
    "actoff": "activations kept in host memory",
    "optoff": "optimizer state kept in host memory",
}
CLASS_WORDS: Final = {
    "forward": "forward compute",
    "backward": "backward compute",
    "recompute": "recomputation",
    "tp_comm": "tensor-parallel communication",
    "cp_comm": "context-parallel communication",
    "ep_comm": "expert exchange",
    "pp_comm": "pipeline transfers",
    "dp_comm": "gradient reduction and weight gathering",
    "offload": "transfers to host memory",
    "optimizer": "optimizer",
    "host": "waiting for the host to launch work",
    "idle": "pipeline bubble and waiting",
}


class Binding(Spec):
    """What limits the best plan.

    Attributes:
        kind: "memory", "bubble" or a resource of planner.sensitivity.
        share: of the step that would go without the limit; of a resource the most that
            any amount of it gives, not what each part of it gives.
    """

    kind: str
    share: float
    text: str


def verdict_text(result: SearchResult, scenario: Scenario) -> str:
    """Returns the verdict in one line."""
    cluster = scenario.cluster
    where = f"{scenario.model.name} on {cluster.num_gpus:,} x {cluster.node.gpu.name}"
    how = {
        "exhaustive": "exhaustive",
        "bounded": "bounded, all priced and the best by bound replayed",
        "sampled": f"sampled from {result.sampled_of:,} points",
    }[result.method]
    counts = f"{how}: {plural(result.candidates, 'candidate')}, {result.fit:,} fit"
    best = result.best
    if best is None:
        lacking = result.infeasible[0] if result.infeasible else None
        need = "" if lacking is None else f": {_lack_text(lacking)}"
        return f"does not fit: {where}{need} ({counts})"
    if result.verdict == "tight":
        return (
            f"fits with less than {100 * result.headroom_asked:.3g} % headroom: {where}, "
            f"{show_percent(best.headroom)} of its memory free ({counts})"
        )
    return f"fits: {where}, {show_percent(best.headroom)} of its memory free ({counts})"


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
    Bubble: idle time. The rest: the plan priced again with each resource infinitely
    fast, so that what hides behind another is not counted.
    """
    best = result.best
    if best is None:
        return ()
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    metrics = best.prediction.metrics
    found = [_bubble(metrics)]
    for held in sensitivities(scenario, best.plan, calibration):
        found.append(
            Binding(kind=held.role, share=round(held.share, 6), text=_sensitivity_text(held))
        )
    memory = _memory(result, best, scenario.objective)
    if memory is not None:
        found.append(memory)
    return tuple(sorted(found, key=lambda b: (-b.share, b.kind)))


def _sensitivity_text(held: Sensitivity) -> str:
    """Returns what was computed: the step priced again with more of the resource.

    The first tenth often gives more than its part of what no limit gives: with every further
    one, more of the step waits for something else.
    """
    tenth = f"{100 * (STEP - 1):.0f} %"
    name = f"{held.role} ({held.name})" if held.name else held.role
    better = _BETTER.get(held.role, "{tenth} faster " + name).format(tenth=tenth)
    endless = "instant ones" if held.role == "launch floor" else f"unlimited {name}"
    return (
        f"{better} would make the step {show_percent(held.tenth)} shorter, {endless} "
        f"{show_percent(held.share)}: then other limits hold it"
    )


def noticeable(binding: tuple[Binding, ...]) -> tuple[Binding, ...]:
    """Returns what is worth telling of `binding_constraint`: shares of 1 % and more."""
    return tuple(b for b in binding if b.share >= _WORTH_TELLING) or binding[:1]


def legend(labels: Iterable[str]) -> str:
    """Returns in one line what the parts of some plans' short names stand for."""
    used = {
        re.sub(r"\d.*", "", part) if part not in _PARTS else part
        for label in labels
        for part in label.split()
    }
    return "; ".join(f"{part} = {words}" for part, words in _PARTS.items() if part in used)


def _bubble(metrics: StepMetrics) -> Binding:
    share = metrics.time_s.get("idle", 0.0) / metrics.step_time_s
    return Binding(
        kind="bubble",
        share=round(share, 6),
        text=f"{show_percent(share)} of the step is pipeline bubble and waiting",
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
            f"{first.plan.label()} would be {show_percent(gain)} "
            f"{'cheaper' if objective in _PAID else 'faster'} but lacks {lacks} "
            f"on stage {first.stage} (largest class of the best plan: {largest_class(metrics)})"
        ),
    )


def _value(plan: ParallelPlan, step_time_s: float, objective: Objective) -> float:
    """Returns what is minimised: seconds, or GPU-seconds for cost and energy."""
    return step_time_s * (plan.world_size if objective in _PAID else 1)


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
    if objective == "gpus" and other.plan.world_size != best.plan.world_size:
        return f"{plural(other.plan.world_size, 'GPU')} instead of {best.plan.world_size:,}"
    if objective == "headroom":
        return f"{show_bytes(b.peak_memory_bytes - a.peak_memory_bytes)} more on the fullest GPU"
    behind = gpus * b.step_time_s / a.step_time_s - 1
    grown = _differences(a.time_s, {k: gpus * v for k, v in b.time_s.items()})
    least = _NOTICEABLE * a.step_time_s
    costs = [f"{CLASS_WORDS[k]} +{show_seconds(d)}" for k, d in grown if d > least][:2]
    because = f": {', '.join(costs)}" if costs and behind > 0 else ""
    return f"{100 * behind:+.1f} %{because}"


def _differences(a: Mapping[str, float], b: Mapping[str, float]) -> list[tuple[str, float]]:
    classes = [k for k in CLASS_WORDS if k in a or k in b]
    pairs = [(k, b.get(k, 0.0) - a.get(k, 0.0)) for k in classes]
    return sorted(pairs, key=lambda p: (-p[1], p[0]))
