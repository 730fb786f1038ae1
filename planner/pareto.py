"""Plans that no other plan beats in every objective at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pareto_front(*objectives: ArrayLike) -> NDArray[np.int64]:
    """Returns the indices of the points that no other point dominates, sorted by objective.

    Smaller is better in every objective. A point dominates another when it is nowhere worse
    and somewhere better; of equal points the first is kept.
    """
    points = np.stack([np.asarray(o, float) for o in objectives], axis=1)
    order = np.lexsort(points.T[::-1])
    order = order[_may_be_on_it(points[order])]
    front: list[int] = []
    best = np.empty((0, points.shape[1]))
    for i in order:  # sorted: only earlier points can dominate or equal this one
        if len(best) and bool(np.any(np.all(best <= points[i], axis=1))):
            continue
        front.append(int(i))
        best = points[front]
    return np.array(front, np.int64)


def _may_be_on_it(points: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns False for sorted points that an earlier one beats in the last objectives too.

    Only looks at earlier points that are best in the second objective so far, and so keeps
    some that are dominated; with two objectives, none but equal ones.
    """
    if len(points) < 2 or points.shape[1] < 2:
        return np.ones(len(points), bool)
    leader = np.minimum.accumulate(points[:, 1])
    first = np.flatnonzero(np.r_[True, points[1:, 1] < leader[:-1]])
    last = first[np.searchsorted(first, np.arange(len(points)), side="right") - 1]
    beaten = (points[last, 1:] <= points[:, 1:]).all(axis=1) & (last != np.arange(len(points)))
    return np.asarray(~beaten)
