"""Best-first search with bounds: which candidates have to be simulated, and which need not.

Every candidate comes with the most it can reach and the least staleness it can have. One is
left out when a simulated one is at least as fresh as it can be and at least as fast as it can
be: neither the best candidate nor any point of the front of throughput against staleness is
lost. So the result equals that of simulating every candidate. A bound may be had in two steps:
a cheap one first, and the sharper one only for candidates whose turn has come.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
# The sharper bounds (most, least level) of a candidate; None: it does not fit.
Refine = Callable[[int], tuple[float, float] | None]

# Levels are sums of few floats: equal ones may differ in the last digits.
_LEVEL_EPS: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Reached:
    """What a simulated candidate reached.

    Attributes:
        value: what is made largest.
        level: its staleness; less is better.
        counts: False where it breaks a goal or does not fit after all: it rules out nothing.
    """

    value: float
    level: float
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Explored:
    """What a search looked at.

    Attributes:
        reached: by candidate, of those that were simulated.
        ruled_out: candidates that their bounds rule out.
        left: candidates that the time did not suffice for; none where the search is complete.
        unfit: candidates that the sharper look found not to fit.
    """

    reached: dict[int, Reached]
    ruled_out: tuple[int, ...]
    left: tuple[int, ...]
    unfit: tuple[int, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every candidate was simulated or ruled out."""
        return not self.left


def best_first(
    most: Floats,
    least_level: Floats,
    simulate: Callable[[int], Reached],
    *,
    refine: Refine | None = None,
    known: Sequence[Reached] = (),
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Explored:
    """Returns what has to be known to name the best candidate and the whole front.

    Args:
        most: the most that each candidate can reach.
        least_level: the least level that each can have.
        simulate: asked for one candidate at a time, the most promising first.
        refine: asked once for a candidate before it is simulated, for sharper bounds.
        known: what others reached before; it rules out as well.
        time_limit_s: no simulation starts after it, but the first one does where nothing is
            known.
        progress: called with (settled, all) after each simulation.
    """
    begun, total = clock(), len(most)
    # Of equal promise the fresher first, then in the order given.
    waiting = [(-float(most[i]), float(least_level[i]), i) for i in range(total)]
    heapq.heapify(waiting)
    reached: dict[int, Reached] = {}
    ruled_out: list[int] = []
    unfit: list[int] = []
    sharp: set[int] = set()
    front = [r for r in known if r.counts]
    while waiting:
        negative, level, index = heapq.heappop(waiting)
        if _beaten(front, -negative, level):
            ruled_out.append(index)
            continue
        if (reached or known) and time_limit_s is not None and clock() - begun > time_limit_s:
            rest = [(negative, level, index), *sorted(waiting)]
            out = [i for n, at, i in rest if _beaten(front, -n, at)]
            left = tuple(i for _, _, i in rest if i not in set(out))
            return Explored(reached, (*ruled_out, *out), left, tuple(unfit))
        if refine is not None and index not in sharp:
            sharp.add(index)
            found = refine(index)
            if found is None:
                unfit.append(index)
            else:
                heapq.heappush(waiting, (-min(found[0], -negative), found[1], index))
            continue
        got = simulate(index)
        reached[index] = got
        if got.counts and not _beaten(front, got.value, got.level):
            front = [r for r in front if r.value > got.value or r.level < got.level]
            front.append(got)
        if progress is not None:
            progress(total - len(waiting), total)
    return Explored(reached, tuple(ruled_out), (), tuple(unfit))


def _beaten(front: list[Reached], value: float, level: float) -> bool:
    return any(r.value >= value and r.level <= level + _LEVEL_EPS for r in front)


def front_of(reached: dict[int, Reached]) -> tuple[int, ...]:
    """Returns the candidates that no other beats in value and level, the freshest first."""
    counted = [i for i, r in reached.items() if r.counts]
    counted.sort(key=lambda i: (reached[i].level, -reached[i].value, i))
    out: list[int] = []
    best = -np.inf
    for i in counted:
        if reached[i].value > best:
            out.append(i)
            best = reached[i].value
    return tuple(out)


def between(values: list[float], chosen: float) -> tuple[float, ...]:
    """Returns the points half way from a chosen value to its neighbours among sorted values."""
    values = sorted(set(values))
    place = values.index(chosen)
    near = values[max(0, place - 1) : place + 2]
    return tuple((chosen + v) / 2 for v in near if v != chosen)
