"""Scenarios run on demand: unknowns fitted first, each outcome made once."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from flopwright.errors import InputError, Violation
from flopwright.simulator.accuracy.rl.outcome import Outcome, outcome_of
from flopwright.simulator.accuracy.rl.rows import Row
from flopwright.simulator.accuracy.rl.schema import Fit, RlScenario
from flopwright.spec.rollouts.experiment import Experiment, LoopExperiment

# Which end of the band of the length shape: the value itself, its low or its high end.
End = Literal["", "low", "high"]
_STEPS: Final = 40
_CLOSE: Final = 1e-3  # tokens are whole: a mean of 700 moves in steps of 0.14 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """One unknown that was chosen by a row."""

    scenario: str
    field: str
    row: str
    value: float


@dataclass(slots=True)
class Predictor:
    """Metrics of scenarios by reference.

    Attributes:
        scenarios, rows: what is predicted and measured.
        fitted: unknowns solved so far.
    """

    scenarios: dict[str, RlScenario]
    rows: dict[str, Row]
    fitted: dict[tuple[str, str], Fitted] = field(default_factory=dict)
    _outcomes: dict[tuple[str, End], Outcome] = field(default_factory=dict)

    def metric(self, here: str, reference: str, end: End = "") -> float:
        """Returns `metric` of scenario `here`, or `scenario.metric`.

        Raises:
            InputError: no such metric, an experiment that cannot be run, or a fit whose row
                is missing or cannot be reached.
        """
        name, _, metric = reference.rpartition(".")
        return self.outcome(name or here, end).metric(metric)

    def outcome(self, name: str, end: End = "") -> Outcome:
        """Returns the outcome of a scenario, its unknowns fitted."""
        if (name, end) not in self._outcomes:
            scenario = self.scenarios[name]
            if scenario.experiment is None:
                raise InputError(Violation(field=name, rule="the scenario has no experiment"))
            experiment = at_end(scenario.experiment, end)
            for fit in scenario.fits:
                value = self._solve(scenario, fit, end)
                experiment = with_field(experiment, fit.field, value)
            self._outcomes[name, end] = outcome_of(experiment)
        return self._outcomes[name, end]

    def has_band(self, name: str) -> bool:
        """Returns whether the lengths' shape of a scenario has a band."""
        experiment = self.scenarios[name].experiment
        return isinstance(experiment, LoopExperiment) and experiment.batch.lengths.band is not None

    def _solve(self, scenario: RlScenario, fit: Fit, end: End) -> float:
        """Returns the value at which the metric equals the row (regula falsi in logarithms)."""
        source = self.scenarios[fit.scenario] if fit.scenario else scenario
        row = self.rows.get(fit.row)
        if row is None or not row.values:
            raise InputError(
                Violation(field="fits.row", value=fit.row,
                          rule=f"{scenario.name} is fitted on it, and it has no value")
            )  # fmt: skip
        if source.experiment is None:
            raise InputError(Violation(field="fits.scenario", rule="has no experiment"))
        key = (f"{source.name}.{fit.field}@{end}", fit.row)
        if key not in self.fitted:
            base = at_end(source.experiment, end)
            value = _root(base, fit, row.values[0].middle, scenario.name)
            self.fitted[key] = Fitted(
                scenario=source.name, field=fit.field, row=fit.row, value=value
            )
        return self.fitted[key].value


def _root(base: Experiment, fit: Fit, target: float, name: str) -> float:
    def off(x: float) -> float:
        predicted = outcome_of(with_field(base, fit.field, x)).metric(fit.metric)
        return math.log(max(predicted, 1e-12) / target)

    low, high = math.log(fit.low), math.log(fit.high)
    f_low, f_high = off(fit.low), off(fit.high)
    if f_low * f_high > 0:
        raise InputError(
            Violation(field="fits", value=f"{fit.field} in {fit.low:g} .. {fit.high:g}",
                      rule=f"{name}: {fit.metric} never equals row {fit.row} ({target:g})")
        )  # fmt: skip
    for _ in range(_STEPS):
        middle = high - f_high * (high - low) / (f_high - f_low)
        value = off(math.exp(middle))
        if abs(value) < _CLOSE:
            return math.exp(middle)
        if value * f_high < 0:
            low, f_low = high, f_high
        else:
            f_low /= 2  # Illinois: an end that stays counts half
        high, f_high = middle, value
    return math.exp(high)


def with_field(experiment: Experiment, path: str, value: float) -> Experiment:
    """Returns the experiment with a number at a dotted path.

    Raises:
        InputError: no such field.
    """
    data: dict[str, Any] = experiment.to_data()
    *parents, last = path.split(".")
    place: Any = data
    for part in parents:
        place = place.get(part) if isinstance(place, dict) else None
    if not isinstance(place, dict):
        raise InputError(Violation(field="fits.field", value=path, rule="no such field"))
    place[last] = _written(last, value)
    return type(experiment).model_validate(data)


def _written(name: str, value: float) -> Any:
    """Returns a number as files write it: whole tokens, rates with their unit."""
    if name in {"rate"}:
        return f"{value} B/s"
    if name in {"mean", "cap"}:
        return max(1, round(value))
    return value


def at_end(experiment: Experiment, end: End) -> Experiment:
    """Returns the experiment with its length shape at one end of its band."""
    if not end or not isinstance(experiment, LoopExperiment):
        return experiment
    lengths = experiment.batch.lengths
    if lengths.band is None:
        return experiment
    sigma = lengths.band[0 if end == "low" else 1]
    changed = lengths.model_copy(update={"sigma": sigma, "band": None})
    batch = experiment.batch.model_copy(update={"lengths": changed})
    return experiment.model_copy(update={"batch": batch})
