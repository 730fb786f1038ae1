"""A published RL scenario: an experiment, the measured rows it predicts, and what was assumed.

One YAML file an experiment (docs/rl_accuracy.md). Nothing about a row stands in code: its
class, its metric, what it is compared with and what was fitted on it are in the file.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from flopwright.spec.base import Spec
from flopwright.spec.rollouts.experiment import Experiment

RowClass = Literal["F1", "F2", "R", "O", "C", "D", "N"]
NAME: Final = r"^[a-z][a-z0-9_]*$"
# `metric`, or `scenario.metric` of another file.
REFERENCE: Final = r"^([a-z][a-z0-9_]*\.)?[a-z][a-z0-9_]*$"
Reference = Annotated[str, Field(pattern=REFERENCE)]
NUMBER: Final = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_TERM: Final = rf"(?:{NUMBER}\s*\*\s*)?(?:{NUMBER}|[A-Za-z][\w.]*)"
CHECK: Final = re.compile(rf"^\s*({_TERM})((?:\s*(?:<=|>=|<|>)\s*{_TERM})+)\s*$")


class ScoredRow(Spec):
    """One measured row and what the experiment says of it.

    Attributes:
        row_class: F1 and F2 are absolute (F2 with a dominant input assumed or fitted), R a
            ratio, O an order or a bound; C (calibration input), D (copy) and N (not
            predictable) are not scored.
        metric: what predicts the value: a metric of this experiment, or `scenario.metric`.
        over: R: the denominator of the predicted ratio.
        partner: R: the row by whose value the measured one is divided; without it the value
            is itself the ratio.
        part: which of several values in the cell, from 0.
        checks: O: comparisons such as "log_prob_time < 0.2 * step_time"; names are metrics,
            `scenario.metric`, row ids (their measured values) and `value` (this row's).
        reason: C, D, N: why it is not scored.
    """

    id: str = Field(min_length=1)
    row_class: RowClass = Field(alias="class")
    metric: Reference | None = None
    over: Reference | None = None
    partner: str | None = None
    part: int | None = Field(default=None, ge=0, le=100)
    checks: tuple[str, ...] = ()
    reason: str = ""

    @field_validator("checks")
    @classmethod
    def _comparisons(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if not CHECK.match(value):
                raise ValueError(
                    f"{value!r} is no comparison; write it like 'log_prob_time < 0.2 * step_time'"
                )
        return values

    @model_validator(mode="after")
    def _by_class(self) -> Self:
        kind = self.row_class
        if kind in {"F1", "F2", "R"} and self.metric is None:
            raise ValueError(f"a row of class {kind} needs a metric")
        if kind == "R" and self.over is None:
            raise ValueError("a row of class R needs 'over', the ratio's denominator")
        if kind != "R" and (self.over is not None or self.partner is not None):
            raise ValueError("over and partner belong to rows of class R")
        if kind == "O" and not self.checks:
            raise ValueError("a row of class O needs checks")
        if kind != "O" and self.checks:
            raise ValueError("checks belong to rows of class O")
        if kind in {"C", "D", "N"} and not self.reason:
            raise ValueError(f"a row of class {kind} needs a reason")
        return self


class Fit(Spec):
    """One unknown, chosen so that a metric equals a measured row that is not scored.

    Attributes:
        field: dotted path in the experiment ("batch.lengths.mean").
        row: the row it is fitted on; metric: what predicts that row.
        scenario: where the fit is done, if not here: the value found there is taken over.
        low, high: where it is searched; the metric must be monotone between them.
    """

    field: str = Field(pattern=r"^[a-z_]+(\.[a-z_]+)*$")
    row: str = Field(min_length=1)
    metric: str = Field(pattern=NAME)
    scenario: str | None = Field(default=None, pattern=NAME)
    low: float = Field(gt=0)
    high: float = Field(gt=0)

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low ({self.low:g}) must be below high ({self.high:g})")
        return self


class RlScenario(Spec):
    """One published experiment.

    Attributes:
        preset: rows of one preset count once in medians (rows from one run or one table).
        url: where the measurement can be read.
        experiment: None where no row of the file is predicted.
        fits: unknowns and the rows they are fitted on.
        chosen: numbers of the experiment that hold for a whole system and were fitted once on
            the rows named, by dotted path; the report lists each of them once.
        sources: where an input comes from, by field; assumed: inputs nobody published.
    """

    kind: Literal["published_rl"] = "published_rl"
    name: str = Field(pattern=NAME)
    preset: str = Field(min_length=1)
    description: str = ""
    url: str = ""
    experiment: Experiment | None = None
    rows: tuple[ScoredRow, ...] = Field(min_length=1)
    fits: tuple[Fit, ...] = ()
    chosen: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    sources: dict[str, str] = Field(default_factory=dict)
    assumed: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _rows_have_an_experiment(self) -> Self:
        if self.experiment is None:
            own = [r.id for r in self.rows if r.row_class in {"F1", "F2", "R"}]
            if own:
                raise ValueError(f"rows {', '.join(own)} need an experiment")
        for path in self.chosen:
            if not _has(self.experiment.to_data() if self.experiment else {}, path):
                raise ValueError(f"chosen: the experiment has no number at {path}")
        seen = [(r.id, r.part) for r in self.rows]
        twice = next((i for n, i in enumerate(seen) if i in seen[:n]), None)
        if twice is not None:
            raise ValueError(f"row {twice[0]} stands twice; give each its 'part'")
        return self


def _has(data: Any, path: str) -> bool:
    """Returns whether plain data has something at a dotted path."""
    for part in path.split("."):
        if not isinstance(data, dict) or data.get(part) is None:
            return False
        data = data[part]
    return True
