"""Which shapes of a grid say most about a curve: those that it is least sure of.

A curve is near enough a plane in the logarithms of its three sides; with the shapes in
hand, the variance of what it says of another shape x is x' (X'X)^-1 x (up to the noise). The
next shape is the one of the grid with the largest (the greedy D-optimal design, Fedorov 1972).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from flopwright.executor.measure.probe_cases import ProbeCase
from flopwright.ops import OpKind

Row = NDArray[np.float64]
# Before any shape was measured: coefficients are known to about this (log) much.
_PRIOR_STD = 3.0


def by_information(known: Iterable[ProbeCase], grid: Sequence[ProbeCase]) -> list[ProbeCase]:
    """Returns the grid's products, the most informative first, beside the shapes known.

    Classes (format, kind) take turns; what has no shape keeps its place at the front.
    """
    spread: dict[tuple[str, str], Row] = defaultdict(lambda: np.eye(4) / _PRIOR_STD**2)
    for case in known:
        if _shaped(case):
            spread[_class(case)] = spread[_class(case)] + _outer(case)
    plain = [c for c in grid if not _shaped(c)]
    left: dict[tuple[str, str], list[ProbeCase]] = defaultdict(list)
    for case in grid:
        if _shaped(case):
            left[_class(case)].append(case)
    found: list[ProbeCase] = []
    while any(left.values()):
        for key in sorted(k for k, cases in left.items() if cases):
            inverse = np.asarray(np.linalg.inv(spread[key]), float)
            variances = [_variance(c, inverse) for c in left[key]]
            best = left[key].pop(int(np.argmax(variances)))
            spread[key] = spread[key] + _outer(best)
            found.append(best)
    return plain + found


def _shaped(case: ProbeCase) -> bool:
    return case.rows.kind[0] in (OpKind.GEMM, OpKind.GROUPED_GEMM)


def _class(case: ProbeCase) -> tuple[str, str]:
    return case.dtype, case.name


def _features(case: ProbeCase) -> Row:
    rows = case.rows
    sides = [float(column[0, 0]) for column in (rows.m, rows.k, rows.n)]
    return np.array([1.0, *np.log(sides)])


def _outer(case: ProbeCase) -> Row:
    x = _features(case)
    return np.outer(x, x)


def _variance(case: ProbeCase, inverse: Row) -> float:
    x = _features(case)
    return float(x @ inverse @ x)
