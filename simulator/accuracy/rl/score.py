"""Errors of rows against what their scenarios say, by the class that the scenario gives them.

Absolute rows: |predicted / measured - 1|. Ratios: |predicted ratio / measured ratio - 1|,
and the sign of what is more than 0.05 from 1. Orders: all comparisons hold. Medians count
each preset once: a row weighs one over the rows of its preset.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from flopwright.errors import InputError
from flopwright.simulator.accuracy.rl.load import names_in
from flopwright.simulator.accuracy.rl.predictor import Predictor
from flopwright.simulator.accuracy.rl.rows import Row
from flopwright.simulator.accuracy.rl.schema import NUMBER, RlScenario, ScoredRow
from flopwright.simulator.accuracy.rl.values import Value

# A prediction that moves by more than this over the band of the length shape says nothing.
UNDETERMINED: Final = 0.4
NEAR_ONE: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """One row (one part of it) with its prediction.

    Attributes:
        measured: the value, or the nearer end of a range; SI units.
        error: signed, predicted over measured less one.
        low, high: predictions at the two ends of the band, equal to `predicted` without one.
        sign_right: R: whether both ratios are on one side of 1; None where they are near it.
    """

    id: str
    part: int | None
    scenario: str
    preset: str
    row_class: str
    metric: str
    predicted: float
    measured: float
    error: float
    low: float
    high: float
    sign_right: bool | None = None

    @property
    def band(self) -> float:
        """Width of the band as a share of the prediction."""
        width = max(self.low, self.high, self.predicted) - min(self.low, self.high, self.predicted)
        return width / abs(self.predicted) if self.predicted else 0.0

    @property
    def undetermined(self) -> bool:
        """Whether an assumed shape decides the prediction."""
        return self.row_class == "F2" and self.band > UNDETERMINED


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """One row of class O: its comparisons, and which of them hold."""

    id: str
    scenario: str
    preset: str
    checks: tuple[tuple[str, bool], ...]

    @property
    def right(self) -> bool:
        """Whether all hold."""
        return all(ok for _, ok in self.checks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """One row that is not scored, and why; `lost` where it should have been.

    Attributes:
        scenario: that names it; "" of none.
    """

    id: str
    row_class: str
    why: str
    lost: bool
    scenario: str = ""


def score_row(
    predictor: Predictor, scenario: RlScenario, given: ScoredRow, row: Row
) -> Scored | Ordered | Skipped:
    """Returns what became of one row."""
    kind = given.row_class
    if kind in {"C", "D", "N"}:
        return Skipped(
            id=row.id, row_class=kind, why=given.reason, lost=False, scenario=scenario.name
        )
    try:
        if kind == "O":
            return _order(predictor, scenario, given, row)
        return _number(predictor, scenario, given, row)
    except InputError as error:
        why = "; ".join(str(v) for v in error.violations)
    except ValidationError as error:  # a computed input that no record allows
        texts = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        why = "; ".join(t.removeprefix(": ").removeprefix("Value error, ") for t in texts)
    return Skipped(id=row.id, row_class=kind, why=why, lost=True, scenario=scenario.name)


def _number(
    predictor: Predictor, scenario: RlScenario, given: ScoredRow, row: Row
) -> Scored | Skipped:
    measured = _measured(predictor, given, row)
    if isinstance(measured, str):
        return Skipped(
            id=row.id, row_class=given.row_class, why=measured, lost=True, scenario=scenario.name
        )
    name = scenario.name
    predicted = _predicted(predictor, name, given)
    low = high = predicted
    if given.row_class == "F2" and predictor.has_band(name):
        low, high = (_predicted(predictor, name, given, end) for end in ("low", "high"))
    error = measured.error(predicted)
    near = predicted / (1 + error) if error > -1 and error else measured.middle
    sign: bool | None = None
    if given.row_class == "R" and abs(measured.middle - 1) > NEAR_ONE:
        sign = (predicted > 1) == (measured.middle > 1)
    return Scored(
        id=row.id, part=given.part, scenario=name, preset=scenario.preset,
        row_class=given.row_class, metric=given.metric or "", predicted=predicted, measured=near,
        error=error, low=low, high=high, sign_right=sign,
    )  # fmt: skip


def _predicted(predictor: Predictor, name: str, given: ScoredRow, end: str = "") -> float:
    assert given.metric is not None
    where = "low" if end == "low" else "high" if end == "high" else ""
    value = predictor.metric(name, given.metric, where)  # type: ignore[arg-type]
    if given.over is None:
        return value
    below = predictor.metric(name, given.over, where)  # type: ignore[arg-type]
    return value / below if below else float("inf")


def _measured(predictor: Predictor, given: ScoredRow, row: Row) -> Value | str:
    """Returns the measured value or ratio, or why there is none."""
    if not row.values:
        return f"its value is in words: {row.text!r}"
    part = given.part or 0
    if part >= len(row.values):
        return f"its value has no part {part}: {row.text!r}"
    own = row.values[part]
    if given.partner is None:
        return own
    partner = predictor.rows.get(given.partner)
    if partner is None or not partner.values:
        return f"its partner {given.partner} has no value"
    below = partner.values[min(part, len(partner.values) - 1)].middle
    if given.partner == row.id:  # parts of one cell: over the first
        below = row.values[0].middle
    return Value(own.low / below, own.high / below)


def _order(predictor: Predictor, scenario: RlScenario, given: ScoredRow, row: Row) -> Ordered:
    checks = tuple((c, holds(predictor, scenario.name, c, row)) for c in given.checks)
    return Ordered(id=row.id, scenario=scenario.name, preset=scenario.preset, checks=checks)


def holds(predictor: Predictor, here: str, check: str, row: Row) -> bool:
    """Returns whether every neighbouring pair of a chain of comparisons holds.

    Raises:
        InputError: a name that is neither a metric nor a row with a value.
    """
    values = {name: _named(predictor, here, name, row) for name in names_in(check)}
    parts = re.split(r"(<=|>=|<|>)", check)
    terms = [_term(t, values) for t in parts[::2]]
    compare = {"<": float.__lt__, "<=": float.__le__, ">": float.__gt__, ">=": float.__ge__}
    pairs = zip(terms, parts[1::2], terms[1:], strict=False)
    return all(compare[sign](float(a), float(b)) for a, sign, b in pairs)


def _named(predictor: Predictor, here: str, name: str, row: Row) -> float:
    if name == "value":
        return row.values[0].middle
    other = predictor.rows.get(name)
    if other is not None and other.values:
        return other.values[0].middle
    return predictor.metric(here, name)


def _term(text: str, values: dict[str, float]) -> float:
    product = 1.0
    for factor in text.split("*"):
        word = factor.strip()
        product *= float(word) if re.fullmatch(NUMBER, word) else values[word]
    return product


def weighted_quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Returns the value at or below which `share` of the weight lies.

    Where that is exactly between two values, their middle; so the median of equal weights is
    the usual one.
    """
    pairs = sorted(zip(values, weights, strict=True))
    target, seen = share * sum(weights), 0.0
    for place, (value, weight) in enumerate(pairs):
        seen += weight
        if abs(seen - target) < 1e-9 and place + 1 < len(pairs):
            return (value + pairs[place + 1][0]) / 2
        if seen > target:
            return value
    return pairs[-1][0] if pairs else float("nan")
