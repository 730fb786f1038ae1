"""How far predictions are from measurements: errors, bias, ranks and intervals of a group.

An error is |predicted / measured - 1| of a step time (or of a memory peak). A group's score
never averages over rows that describe one configuration: each configuration counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from flopwright.ops import Array

# A rank correlation of fewer configurations says nothing.
MIN_SWEEP: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One configuration, predicted and measured, in one unit (seconds or bytes).

    Attributes:
        low, high: central 80 % interval of the prediction.
        labels: what it can be grouped by ("source", "gpu", "model", "family", "stack", ...).
        cell: key of the (source, model, GPU) cell it belongs to.
        sweep: key of the sweep whose order it is ranked in; "" where there is none.
        assumed: what the row did not say and the prediction took for granted.
    """

    id: str
    measured: float
    predicted: float
    low: float
    high: float
    labels: Mapping[str, str]
    cell: str = ""
    sweep: str = ""
    assumed: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Signed relative error, predicted / measured - 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The score of a group; None where nothing was there to score.

    Attributes:
        n: configurations scored.
        coverage: n over the configurations of the group that were in scope.
        median_abs_error, p90_abs_error: of |predicted / measured - 1|.
        bias: median of predicted / measured - 1.
        spearman: median of the rank correlation of step times within a sweep: the runs of one
            source, model and processor (a cell).
        spearman_one_batch: the same within finer sweeps: one number of processors, batch,
            length and precision, so that only plans differ.
        interval80_coverage: share of measurements inside the prediction's 80 % interval.
    """

    n: int
    coverage: float | None
    median_abs_error: float | None
    p90_abs_error: float | None
    bias: float | None
    spearman: float | None
    spearman_one_batch: float | None
    interval80_coverage: float | None

    def to_data(self) -> dict[str, float | int | None]:
        """Returns the score as plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MacroScore:
    """Cells instead of configurations: each cell counts once, by its median error.

    Attributes:
        cells: how many there are.
        median_abs_error, p90_abs_error: over the cells' median errors.
    """

    cells: int
    median_abs_error: float | None
    p90_abs_error: float | None

    def to_data(self) -> dict[str, float | int | None]:
        """Returns the score as plain data."""
        return asdict(self)


def score(runs: Sequence[Scored], in_scope: int | None = None) -> Score:
    """Returns the score of a group.

    Args:
        in_scope: configurations that should have been predicted; None where all were.
    """
    total = len(runs) if in_scope is None else in_scope
    coverage = len(runs) / total if total else None
    if not runs:
        return Score(
            n=0, coverage=coverage, median_abs_error=None, p90_abs_error=None, bias=None,
            spearman=None, spearman_one_batch=None, interval80_coverage=None,
        )  # fmt: skip
    signed = np.array([r.error for r in runs])
    inside = np.array([r.low <= r.measured <= r.high for r in runs])
    return Score(
        n=len(runs),
        coverage=coverage,
        median_abs_error=float(np.median(np.abs(signed))),
        p90_abs_error=float(np.quantile(np.abs(signed), 0.9)),
        bias=float(np.median(signed)),
        spearman=sweep_spearman(runs, lambda r: r.cell),
        spearman_one_batch=sweep_spearman(runs, lambda r: r.sweep),
        interval80_coverage=float(inside.mean()),
    )


def macro(runs: Sequence[Scored]) -> MacroScore:
    """Returns the score over cells."""
    cells = grouped(runs, lambda r: r.cell)
    medians = np.array([np.median([abs(r.error) for r in cell]) for cell in cells.values()])
    if not len(medians):
        return MacroScore(cells=0, median_abs_error=None, p90_abs_error=None)
    return MacroScore(
        cells=len(medians),
        median_abs_error=float(np.median(medians)),
        p90_abs_error=float(np.quantile(medians, 0.9)),
    )


def sweep_spearman(runs: Sequence[Scored], key: Callable[[Scored], str]) -> float | None:
    """Returns the median over sweeps of Spearman's rank correlation; None without a sweep.

    A sweep has at least MIN_SWEEP different predictions: repeats of one plan have no order.

    Args:
        key: what a run's sweep is named by; "" is in none.
    """
    found = []
    for name, sweep in grouped(runs, key).items():
        if name and len({r.predicted for r in sweep}) >= MIN_SWEEP:
            rho = spearman([r.predicted for r in sweep], [r.measured for r in sweep])
            if rho is not None:
                found.append(rho)
    return float(np.median(found)) if found else None


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Returns Spearman's rank correlation, ties at their mean rank; None where one is constant."""
    x, y = mean_ranks(np.asarray(a, float)), mean_ranks(np.asarray(b, float))
    x, y = x - x.mean(), y - y.mean()
    norm = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / norm if norm > 0 else None


def mean_ranks(values: Array) -> Array:
    """Returns the rank of each value from 0, equal values at the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts + 1) / 2.0)[inverse])


def grouped(runs: Iterable[Scored], key: Callable[[Scored], str]) -> dict[str, list[Scored]]:
    """Returns the runs by key, in order of appearance."""
    out: dict[str, list[Scored]] = {}
    for run in runs:
        out.setdefault(key(run), []).append(run)
    return out


def under_by_5_percent_share(runs: Sequence[Scored]) -> float | None:
    """Returns the share of predictions that lie more than 5 % below what was measured."""
    if not runs:
        return None
    return float(np.mean([r.error < -0.05 for r in runs]))


def with_prediction(run: Scored, predicted: float, low: float, high: float) -> Scored:
    """Returns the same configuration with another prediction."""
    return replace(run, predicted=predicted, low=low, high=high)
