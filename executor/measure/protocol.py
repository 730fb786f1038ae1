"""From step times of interleaved rounds to a plan's time, its spread and the noise floor.

All plans of a launch take turns in rounds (A B C A B C ...), so that what else the machine
does falls on all of them. A plan's time is the median of its rounds' medians.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

WARMUP_ROUNDS: Final = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """One plan's turn in a round: it runs steps first_step .. first_step + num_steps - 1."""

    round: int
    entry: int
    first_step: int
    num_steps: int


def turns(
    num_entries: int, num_steps: int, steps_per_round: int, begin: int = 0
) -> Iterator[Turn]:
    """Yields the turns of a launch in order; every plan makes `num_steps` steps in all.

    Args:
        begin: steps that every plan has made before.
    """
    assert num_entries > 0
    assert steps_per_round > 0
    for first in range(begin, num_steps, steps_per_round):
        index = -(-first // steps_per_round)
        for entry in range(num_entries):
            yield Turn(index, entry, first, min(steps_per_round, num_steps - first))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """A plan's kept steps in seconds.

    Attributes:
        step_time_s: median of the round medians.
        samples_s: kept steps, in order.
    """

    step_time_s: float
    p10_s: float
    p90_s: float
    samples_s: tuple[float, ...]
    discarded_steps: int


def summarise(rounds: Sequence[Sequence[float]], warmup_rounds: int = WARMUP_ROUNDS) -> StepTimes:
    """Returns a plan's time from the step times of each of its rounds.

    Args:
        rounds: seconds of each step, by round; at least one step in all.
        warmup_rounds: rounds at the beginning that are not kept (where others follow).
    """
    kept = [r for r in rounds[warmup_rounds:] if r] or [r for r in rounds if r][-1:]
    samples = tuple(t for r in kept for t in r)
    assert samples, "a plan without a step has no time"
    return StepTimes(
        step_time_s=median(median(r) for r in kept),
        p10_s=float(np.quantile(samples, 0.1)),
        p90_s=float(np.quantile(samples, 0.9)),
        samples_s=samples,
        discarded_steps=sum(len(r) for r in rounds) - len(samples),
    )


def noise_floor(times_s: Sequence[float]) -> float | None:
    """Returns the largest relative difference between entries that ran the same plan.

    Args:
        times_s: their step times; None is returned for fewer than two.
    """
    if len(times_s) < 2:
        return None
    return max(times_s) / min(times_s) - 1.0
