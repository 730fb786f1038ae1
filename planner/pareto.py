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
    front: list[int] = []
    best = np.empty((0, points.shape[1]))
    for i in order:  # sorted: only earlier points can dominate or equal this one
        if len(best) and bool(np.any(np.all(best <= points[i], axis=1))):
            continue
        front.append(int(i))
        best = points[front]
    return np.array(front, np.int64)
