"""Which lambda is best: rounds at each, on the same lengths, under a bound on staleness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pydantic import Field

from flopwright.errors import InputError
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.rounds import Progress, simulate
from flopwright.spec.base import Spec
from flopwright.spec.rollout import MIN_STOP_FRACTION, RolloutScenario, with_stop_fraction

_GRID: Final = (0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.98, 1.0)
_PLATEAU: Final = 0.02  # within this share of the best, less staleness is the better buy


class LambdaSweep(Spec):
    """Steady rounds over lambda, ascending.

    Attributes:
        best: index of the point of most attempts/s among those within the bound.
        calmest: index of the largest lambda within 2 % of the best: nearly as fast, fresher.
        max_mean_staleness: the bound; None where there is none.
        binding: what keeps the best from being faster, in words.
    """

    points: tuple[RoundReport, ...] = Field(min_length=1)
    best: int
    calmest: int
    max_mean_staleness: float | None = None
    binding: str

    @property
    def best_point(self) -> RoundReport:
        """The report at the best lambda."""
        return self.points[self.best]

    @property
    def calmest_point(self) -> RoundReport:
        """The report at the largest lambda within 2 % of the best."""
        return self.points[self.calmest]

    @property
    def synchronous(self) -> RoundReport:
        """The report at the largest lambda, to compare with."""
        return self.points[-1]


def default_fractions(own: float, max_mean_staleness: float | None) -> tuple[float, ...]:
    """Returns a grid from 0.3 to 1, the scenario's lambda, and the least that the bound allows.

    By Little's law that is 1 / (1 + bound), rounded up.
    """
    extra = {own}
    if max_mean_staleness is not None:
        least = math.ceil(1000 / (1 + max_mean_staleness)) / 1000
        extra.add(max(MIN_STOP_FRACTION, least))
    return tuple(sorted({*_GRID, *extra}))


def sweep_lambda(
    scenario: RolloutScenario,
    stop_fractions: Sequence[float] | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    max_mean_staleness: float | None = None,
    progress: Progress | None = None,
) -> LambdaSweep:
    """Returns steady rounds at each lambda and the best of them.

    The n-th attempt has the same length at every lambda (paired seeds), and each lambda has
    its own warm-up. Staleness is judged by its mean at completion, in policy versions.

    Args:
        stop_fractions: None takes `default_fractions`.
        max_mean_staleness: None takes the scenario's goal.
        progress: called with (points done, points in all).

    Raises:
        InputError: no lambda given, one outside [0.01, 1], or none within the bound.
    """
    bound = scenario.goals.max_mean_staleness if max_mean_staleness is None else max_mean_staleness
    if stop_fractions is None:
        stop_fractions = default_fractions(scenario.stop_fraction, bound)
    if not stop_fractions:
        raise InputError("a sweep needs at least one lambda")
    scenarios = [with_stop_fraction(scenario, x) for x in sorted(set(stop_fractions))]
    points = []
    for done, each in enumerate(scenarios):
        points.append(simulate(each, rounds, seed))
        if progress is not None:
            progress(done + 1, len(scenarios))
    return choose(points, bound)


def choose(points: Sequence[RoundReport], max_mean_staleness: float | None) -> LambdaSweep:
    """Returns the sweep with its best point; see `sweep_lambda`."""
    allowed = [
        i
        for i, p in enumerate(points)
        if max_mean_staleness is None or p.mean_staleness <= max_mean_staleness + 1e-12
    ]
    if not allowed:
        least = min(p.mean_staleness for p in points)
        raise InputError(
            f"no lambda of the sweep keeps the mean staleness at {max_mean_staleness:g} versions "
            f"(the least is {least:.3g}); allow more or sweep nearer to lambda 1"
        )
    best = max(allowed, key=lambda i: points[i].attempts_per_s)
    enough = (1 - _PLATEAU) * points[best].attempts_per_s
    calmest = max(i for i in allowed if points[i].attempts_per_s >= enough)
    return LambdaSweep(
        points=tuple(points),
        best=best,
        calmest=calmest,
        max_mean_staleness=max_mean_staleness,
        binding=_binding(points, best, allowed),
    )


def _binding(points: Sequence[RoundReport], best: int, allowed: Sequence[int]) -> str:
    free = max(range(len(points)), key=lambda i: points[i].attempts_per_s)
    if free not in allowed:
        gain = points[free].attempts_per_s / points[best].attempts_per_s - 1
        return (
            f"the staleness bound: lambda {points[free].stop_fraction:g} would give "
            f"{gain:.1%} more attempts/s at {points[free].mean_staleness:.2f} versions behind"
        )
    if best == len(points) - 1:
        return "nothing: no attempt is worth parking here"
    if best == 0:
        return "the sweep's lowest lambda: a lower one may be better still"
    return "the fixed cost of a round: at a lower lambda it is paid more often"
