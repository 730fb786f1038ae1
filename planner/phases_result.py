"""What a run of several phases takes: a plan, its time and its cost a phase, and in total."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeFloat

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.result import RankedPlan
from flopwright.planner.whole_run import WholeRun
from flopwright.report.metrics import Interval
from flopwright.spec.base import Spec


class RateSegment(Spec):
    """A stretch of the learning rate: from `first` at its first step to `last` at its last."""

    kind: Literal["warm-up", "hold", "linear", "cosine"]
    steps: int
    first: float
    last: float


class BatchRun(Spec):
    """The steps of one batch: the full one, or one of a ramp's."""

    sequences: int
    microbatches: int
    steps: int
    step_time_s: float


class PhaseRun(Spec):
    """One phase, planned.

    Attributes:
        rope_scaling: of its positions, in words.
        changes: whether its split is another than the phase's before it.
        restart_s: time before it, counted where it changes.
        candidates: plans that were priced for it; 0 where an earlier phase's search was its.
        searched_as: the phase whose search was taken, itself where it was searched for.
        missing: what the nearest plan lacks; "" where one fits, and then plan and run are given.
    """

    name: str
    mixture: str | None = None
    seq_len: int
    rope_scaling: str
    total_tokens: int
    batches: tuple[BatchRun, ...] = ()
    learning_rate: tuple[RateSegment, ...]
    plan: RankedPlan | None = None
    run: WholeRun | None = None
    changes: bool = False
    restart_s: NonNegativeFloat = 0.0
    searched_as: str
    candidates: int = 0
    missing: str = ""


class PhasedRun(Spec):
    """The whole run: every phase in order, and their sums.

    The totals are None where a phase has no plan that fits. Their interval adds the phases'
    ends: what makes one phase slower than predicted makes all of them slower.

    Attributes:
        days: with the time between phases.
        gpu_hours, usd: with the GPUs that wait between phases; kwh: without them.
    """

    scenario: str
    phases: tuple[PhaseRun, ...]
    steps: int | None = None
    tokens: int | None = None
    days: float | None = None
    days_interval: Interval | None = None
    gpu_hours: float | None = None
    usd: float | None = None
    kwh: float | None = None
    restarts_s: float = 0.0
    assumptions: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every phase has a plan that fits."""
        return all(phase.plan is not None for phase in self.phases)

    def split_of(self, name: str) -> ParallelPlan | None:
        """Returns the split of the phase of that name, None where none fits."""
        plan = next(phase.plan for phase in self.phases if phase.name == name)
        return None if plan is None else plan.plan
