"""What a search for a loop returns: the best, the front, what does not fit, what binds."""

from __future__ import annotations

from pydantic import Field

from flopwright.errors import Violation
from flopwright.plan.loop import LoopPlan
from flopwright.planner.rollouts.outcome import Outcome
from flopwright.spec.base import Spec
from flopwright.spec.rollout import RolloutScenario
from flopwright.units import plural


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
        structures: layouts with their GPUs and instances; each was bounded but for `unbounded`.
        bounded: choices with a bound of their own; screened: those with a short simulation.
        settled: no choice that differs from the best in one axis is better; otherwise the search
            ended before it had looked at all of these, because the time was up (`timed_out`) or
            it had made as many moves as it may.
        unfinished: choices that a short look found fast or fresh, and that the time did not
            suffice to simulate in full.
        gap: by how much the fastest choice of those structures that was not simulated could be
            faster at most.
    """

    structures: int
    unbounded: int = 0
    bounded: int
    screened: int
    settled: bool
    timed_out: bool = False
    unfinished: int = 0
    gap: float


class LoopResult(Spec):
    """The outcome of a search.

    Attributes:
        candidates: choices looked at; simulated: those that ran; ruled_out: those that their
            bound rules out; left: those that the time did not suffice for.
        refined: values between the best one's neighbours were tried.
        unpriced: shapes of instance that the time did not suffice to price.
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
    refined: bool = True
    unpriced: int = 0
    coverage: Coverage | None = None
    ranked: tuple[RankedLoop, ...] = ()
    front: tuple[RankedLoop, ...] = ()
    infeasible: tuple[InfeasibleLoop, ...] = ()
    binds: dict[str, float] = Field(default_factory=dict)
    assumptions: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every candidate was simulated or ruled out: the best is the best."""
        cover = self.coverage
        known = cover is None or (cover.gap <= 0 and not cover.unbounded)
        return self.left == 0 and not self.unpriced and known

    @property
    def ended_early(self) -> tuple[str, ...]:
        """What the search would have looked at too and did not, in words; () of nothing."""
        out, cover = [], self.coverage
        if self.unpriced:
            out.append(f"{plural(self.unpriced, 'shape')} of instance not priced: the time was up")
        if cover is not None and cover.unbounded:
            text = plural(cover.unbounded, "structure")
            out.append(f"{text} not bounded, and may be any faster: the time was up")
        if self.left:
            out.append(f"{plural(self.left, 'choice')} not looked at: the time was up")
        if cover is not None and not cover.settled:
            why = "the time was up" if cover.timed_out else "it had made its moves"
            out.append(f"not every neighbour of the best was looked at: {why}")
        if cover is not None and cover.unfinished:
            text = plural(cover.unfinished, "choice")
            out.append(f"{text} found good not simulated in full: the time was up")
        if not self.refined:
            out.append("nothing between the best one's neighbours was tried: the time was up")
        return tuple(out)

    @property
    def best(self) -> RankedLoop | None:
        """The best loop; None where none fits."""
        return self.ranked[0] if self.ranked else None
