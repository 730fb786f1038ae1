"""What compute loses beside traffic, by communication class, from a probe's overlap points."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Final

from flopwright.report.probe import OverlapPoint

# Which collectives a class of communication is made of.
_COLLECTIVES_OF: Final = {
    "dp_comm": ("all_reduce", "reduce_scatter", "all_gather"),
    "dp_gather": ("all_gather",),
    "tp_comm": ("all_gather", "reduce_scatter", "all_reduce"),
    "cp_comm": ("all_gather", "reduce_scatter"),
    "ep_comm": ("all_to_all",),
}
# Compute cannot lose more than the machine stands still for.
_MOST: Final = 1.0


def overlap_slowdowns(points: Iterable[OverlapPoint]) -> dict[str, float]:
    """Returns seconds lost for every hidden second, by class; nothing of no points.

    It is the median over the collectives that the class is made of.
    """
    by_name: dict[str, list[float]] = {}
    for point in points:
        by_name.setdefault(point.collective, []).append(min(point.slowdown, _MOST))
    found = {
        cls: [s for name in names for s in by_name.get(name, [])]
        for cls, names in _COLLECTIVES_OF.items()
    }
    return {cls: median(values) for cls, values in found.items() if values}
