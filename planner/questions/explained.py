"""Why a plan is as fast as it is, what stands next to it, and what would make it faster."""

from __future__ import annotations

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.explain import Binding, binding_constraint, verdict_text
from flopwright.planner.questions.more import Purchase, purchases
from flopwright.planner.questions.neighbours import Neighbour, neighbours
from flopwright.planner.questions.replan import rules_broken
from flopwright.planner.result import InfeasiblePlan, RankedPlan, SearchResult
from flopwright.planner.search import search
from flopwright.planner.sensitivity import STEP, sensitivities
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.units import show_bytes


class Faster(Spec):
    """What a resource holds back: planner.sensitivity's numbers."""

    role: str
    name: str
    factor: float = STEP
    share: float
    gain: float


class Explanation(Spec):
    """One plan, explained.

    Attributes:
        searched: whether the plan is a search's own (the best, or the nearest to fitting).
        binding: what limits it, the strongest first.
        neighbours: every plan one choice away.
        faster: what each resource `factor` times as fast takes off the step (share of it).
        purchases: what more GPUs and memory would buy.
    """

    plan: ParallelPlan
    searched: bool
    verdict_text: str
    step_time_s: float
    peak_memory_bytes: int
    binding: tuple[Binding, ...]
    neighbours: tuple[Neighbour, ...]
    faster: tuple[Faster, ...]
    purchases: tuple[Purchase, ...]


def plan_of(
    scenario: Scenario, plan: ParallelPlan | None, calibration: Calibration
) -> tuple[ParallelPlan, SearchResult | None]:
    """Returns the plan in question, and the search that found it where none was given.

    Where nothing fits it is the plan nearest to fitting.

    Raises:
        InputError: every rule that the given plan breaks; or no plan is legal.
    """
    if plan is not None:
        broken = rules_broken(plan, scenario)
        if broken:
            raise InputError(broken)
        return plan, None
    result = search(scenario, calibration, top_k=1)
    best = result.best
    return (best.plan if best is not None else result.infeasible[0].plan), result


def explain(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    result: SearchResult | None = None,
) -> Explanation:
    """Returns why the plan is as it is; a plan of the user's is set against its neighbours.

    Args:
        result: the search that found it, where one did: what it lacks then counts as well.
    """
    prediction, _ = predict(scenario, plan, calibration, plan.label(), whole_trace=False)
    metrics = prediction.metrics
    beside = neighbours(scenario, plan, calibration)
    hbm = scenario.cluster.node.gpu.hbm_bytes
    own = SearchResult(
        verdict="fits" if metrics.peak_memory_bytes <= hbm else "does_not_fit",
        candidates=1,
        fit=int(metrics.peak_memory_bytes <= hbm),
        headroom_asked=scenario.search.memory_headroom,
        ranked=(
            RankedPlan(
                rank=1,
                plan=plan,
                prediction=prediction,
                headroom=1 - metrics.peak_memory_bytes / hbm,
            ),
        ),
        infeasible=tuple(_lacking(n, metrics.step_time_s) for n in beside if n.missing_bytes)
        + (result.infeasible if result is not None else ()),
    )
    return Explanation(
        plan=plan,
        searched=result is not None,
        verdict_text=verdict_text(result, scenario)
        if result is not None
        else _own_verdict(plan, metrics.peak_memory_bytes, hbm),
        step_time_s=metrics.step_time_s,
        peak_memory_bytes=metrics.peak_memory_bytes,
        binding=binding_constraint(own, scenario, calibration),
        neighbours=beside,
        faster=tuple(
            Faster(role=s.role, name=s.name, share=s.share, gain=s.tenth)
            for s in sensitivities(scenario, plan, calibration)
        ),
        purchases=purchases(scenario, plan, calibration, _legal(beside)),
    )


def _own_verdict(plan: ParallelPlan, peak_bytes: int, hbm_bytes: int) -> str:
    if peak_bytes <= hbm_bytes:
        return f"{plan.label()} fits: {show_bytes(hbm_bytes - peak_bytes)} free"
    return f"{plan.label()} lacks {show_bytes(peak_bytes - hbm_bytes)}"


def _legal(beside: tuple[Neighbour, ...]) -> list[ParallelPlan]:
    return [n.plan for n in beside if n.outcome != "breaks a rule"]


def _lacking(neighbour: Neighbour, step_time_s: float) -> InfeasiblePlan:
    return InfeasiblePlan(
        plan=neighbour.plan,
        step_time_s=step_time_s * (1 + (neighbour.behind or 0.0)),
        peak_memory_bytes=neighbour.peak_memory_bytes,
        missing_bytes=neighbour.missing_bytes,
        stage=neighbour.stage,
        violations=(),
    )
