"""How much more the GPU with the busiest experts has to do than the mean one."""

from __future__ import annotations

import math
from statistics import NormalDist


def largest_of(count: int) -> float:
    """Returns the expected largest of `count` standard normal numbers (Blom 1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def busiest_share(cv: float, slots: float, ranks: int) -> float:
    """Returns the load of the busiest of `ranks` GPUs over the mean.

    A GPU's load is the sum over its expert slots, whose popularity has the coefficient of
    variation `cv`: its own spread is cv / sqrt(slots), and the busiest of the ranks counts.
    """
    if ranks <= 1:
        return 1.0
    return 1.0 + cv / math.sqrt(max(slots, 1.0)) * largest_of(ranks)
