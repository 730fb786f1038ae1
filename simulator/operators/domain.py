"""Shapes outside a curve's points: priced all the same, and said so."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import OpTable
from flopwright.simulator.calibration.model import EfficiencyCurve

EXTRAPOLATED: Final = "extrapolated"
# Bytes stream alike at every size; only a product's efficiency has a shape.
_SHAPED: Final = frozenset({"gemm", "grouped_gemm", "attention"})


def outside(curve: EfficiencyCurve, ops: OpTable, rows: NDArray[np.intp]) -> str:
    """Returns the words for shapes of `rows` that lie beyond the curve's points, "" for none.

    Rows that no candidate runs do not count; neither do shapes of no size.
    """
    if curve.kind not in _SHAPED:
        return ""
    runs = (ops.count[rows] > 0) & (ops.flops[rows] > 0)
    beyond = []
    for side, (low, high) in curve.domain.items():
        sizes = getattr(ops, side)[rows][runs]
        if not sizes.size:
            continue
        if sizes.max() > high:
            beyond.append(f"{side} above {high:,.0f}")
        if sizes.min() < low:
            beyond.append(f"{side} below {low:,.0f}")
    if not beyond:
        return ""
    what = f"{curve.kind} in {curve.dtype}"
    return f"{what} is {EXTRAPOLATED} to {', '.join(beyond)}"


def extrapolations(assumptions: tuple[str, ...]) -> int:
    """Returns how many of a prediction's assumptions are extrapolations of curves."""
    return sum(f" is {EXTRAPOLATED} to " in text for text in assumptions)
