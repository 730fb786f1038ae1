"""What a search for a loop returns: the best, the front, what does not fit, what binds."""

from __future__ import annotations

from pydantic import Field

from flopwright.errors import Violation
from flopwright.plan.loop import LoopPlan
from flopwright.planner.rollouts.outcome import Outcome
from flopwright.spec.base import Spec
from flopwright.spec.rollout import RolloutScenario


class RankedLoop(Spec):
    """One loop that fits and keeps the goals.

    Attributes:
        words: its choice in short.
        plan: both layouts, their hand-over and what lies where.
        scenario: its round, complete in numbers.
        kv_capacity_tokens: of an instance alone on its GPUs, where it was priced.
    """

    words: str
    plan: LoopPlan = Field(repr=False)
    outcome: Outcome
    scenario: RolloutScenario = Field(repr=False)
    kv_capacity_tokens: int | None = None


class InfeasibleLoop(Spec):
    """One loop that does not fit or breaks a goal, with the most it could have reached."""

    words: str
    most_attempts_per_s: float
    violations: tuple[Violation, ...]


class Coverage(Spec):
    """What a search from coarse to fine looked at.

    Attributes:
        structures: layouts with their GPUs and instances; each was bounded.
        bounded: choices with a bound of their own; screened: those with a short simulation.
        settled: no choice that differs from the best in one axis is better.
        gap: by how much the fastest choice that was not simulated could be faster at most.
    """

    structures: int
    bounded: int
    screened: int
    settled: bool
    gap: float


class LoopResult(Spec):
    """The outcome of a search.

    Attributes:
        candidates: choices looked at; simulated: those that ran; ruled_out: those that their
            bound rules out; left: those that the time did not suffice for.
        ranked: the best, best first, one a layout and staleness first of all others.
        front: throughput against staleness, the freshest first: none is both staler and
            slower than another.
        infeasible: first those that could be faster than the best; one a rule comes first.
        binds: by how much faster the best would be without each thing.
    """

    scenario: str
    objective: str
    seed: int = 0
    candidates: int
    simulated: int
    ruled_out: int
    left: int
    seconds: float
    coverage: Coverage | None = None
    ranked: tuple[RankedLoop, ...] = ()
    front: tuple[RankedLoop, ...] = ()
    infeasible: tuple[InfeasibleLoop, ...] = ()
    binds: dict[str, float] = Field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every candidate was simulated or ruled out: the best is the best."""
        return self.left == 0 and (self.coverage is None or self.coverage.gap <= 0)

    @property
    def best(self) -> RankedLoop | None:
        """The best loop; None where none fits."""
        return self.ranked[0] if self.ranked else None
