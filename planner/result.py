"""What a search returns: the verdict, the best plans, and what does not fit and why."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from flopwright.errors import Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.metrics import Prediction
from flopwright.spec.base import Spec
from flopwright.spec.workload import GemmRecipe

Verdict = Literal["fits", "tight", "does_not_fit"]


class RankedPlan(Spec):
    """One plan that fits.

    Attributes:
        rank: 1 is best; one plan a layout, the layout's best, is listed.
        headroom: share of GPU memory left at the peak of the fullest stage.
        variants: plans of the same layout that fit (other virtual stages, recompute, storage,
            split).
        refined_step_time_s: the step by the event engine; None where it was not asked.
        gemm: the format of matrix products, where the search tries several; None: the
            scenario's.
    """

    rank: int
    plan: ParallelPlan
    prediction: Prediction
    headroom: float
    variants: int = 1
    refined_step_time_s: float | None = None
    gemm: GemmRecipe | None = None

    @property
    def best_step_time_s(self) -> float:
        """The step by the event engine where it was asked, else by the replay."""
        return self.refined_step_time_s or self.prediction.metrics.step_time_s


class InfeasiblePlan(Spec):
    """One plan that does not fit.

    Attributes:
        step_time_s: what its step would take with enough memory, replayed.
        missing_bytes: memory lacking on the GPUs of stage `stage`.
        violations: rule, value, limit and nearest fix (more GPUs, where nothing fits).
        memory_bytes: what the GPUs of that stage hold, by class.
    """

    plan: ParallelPlan
    step_time_s: float
    peak_memory_bytes: int
    missing_bytes: int
    stage: int
    violations: tuple[Violation, ...]
    memory_bytes: dict[str, int] = Field(default_factory=dict)


class TradeOff(Spec):
    """One plan of the front: no other is better in time, headroom and cost at once."""

    plan: ParallelPlan
    step_time_s: float
    headroom: float
    gpus: int


class SearchResult(Spec):
    """The outcome of a search.

    Attributes:
        verdict: "fits"; "tight" where the best plan leaves less than the headroom asked
            for; "does_not_fit".
        candidates: legal plans priced; fit: those that memory holds; replayed: those whose
            lowered list was replayed to find the best.
        proved: no plan outside the replayed ones can be among the best.
        sampled_of: points of the space that the candidates are a sample of; 0: they are all.
        refined: plans that went through the event engine, and are ranked by it.
        ranked: the best plan of each layout, best first.
        infeasible: plans that lack memory: faster ones first where something fits,
            else the nearest to fitting.
        front: time against headroom against cost.
    """

    verdict: Verdict
    candidates: int
    fit: int
    replayed: int = 0
    proved: bool = True
    sampled_of: int = 0
    refined: int = 0
    headroom_asked: float
    ranked: tuple[RankedPlan, ...] = ()
    infeasible: tuple[InfeasiblePlan, ...] = ()
    front: tuple[TradeOff, ...] = Field(default=())

    @property
    def method(self) -> str:
        """How sure the ranking is.

        "exhaustive": every legal candidate is ruled out or ranked exactly; "bounded": all were
        priced, and those of the best bounds replayed; "sampled": there were too many.
        """
        if self.sampled_of:
            return "sampled"
        return "exhaustive" if self.proved else "bounded"

    @property
    def best(self) -> RankedPlan | None:
        """The best plan, None where nothing fits."""
        return self.ranked[0] if self.ranked else None
