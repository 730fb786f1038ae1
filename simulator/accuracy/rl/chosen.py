"""Numbers of a whole system or engine that were fitted once, on rows that a report may score."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flopwright.simulator.accuracy.rl.schema import RlScenario
from flopwright.simulator.rollouts.engine.software import engine_software
from flopwright.spec.rollouts.engine_experiment import EngineExperiment
from flopwright.spec.rollouts.engine_served import EngineSoftware
from flopwright.spec.rollouts.experiment import LoopExperiment, RanksExperiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """One number, where it is written, and the rows it was fitted on.

    Attributes:
        of: engines' software, or presets whose scenarios all have the number.
    """

    of: tuple[str, ...]
    field: str
    value: float
    rows: tuple[str, ...]


def chosen_numbers(scenarios: Iterable[RlScenario]) -> tuple[Chosen, ...]:
    """Returns the fitted numbers that these scenarios use, each once, in a fixed order."""
    found: dict[tuple[str, float, tuple[str, ...]], set[str]] = {}
    for scenario in scenarios:
        for each in (*_of_scenario(scenario), *_of_engine(scenario)):
            found.setdefault((each.field, each.value, each.rows), set()).update(each.of)
    return tuple(
        Chosen(of=tuple(sorted(of)), field=field, value=value, rows=rows)
        for (field, value, rows), of in sorted(found.items())
    )


def _of_scenario(scenario: RlScenario) -> list[Chosen]:
    if scenario.experiment is None:
        return []
    given = scenario.experiment
    return [
        Chosen(of=(scenario.preset,), field=path, value=_at(given, path), rows=rows)
        for path, rows in scenario.chosen.items()
    ]


def _of_engine(scenario: RlScenario) -> list[Chosen]:
    engine = _software(scenario)
    if engine is None:
        return []
    return [
        Chosen(of=(engine.name,), field=name, value=float(getattr(engine, name)), rows=rows)
        for name, rows in engine.fitted.items()
    ]


def _software(scenario: RlScenario) -> EngineSoftware | None:
    match scenario.experiment:
        case LoopExperiment(rollout=rollout) if rollout.engine.numbers is None:
            named = rollout.engine.software
        case RanksExperiment(engine=setup) if setup.numbers is None:
            named = setup.software
        case EngineExperiment(software=software):
            named = software
        case _:
            return None
    return engine_software(named) if isinstance(named, str) else named


def _at(record: Any, path: str) -> float:
    """Returns the number at a dotted path of a record, in SI units."""
    for part in path.split("."):
        fields = type(record).model_fields
        name = next((n for n, f in fields.items() if part in {n, f.alias}), part)
        record = getattr(record, name)
    return float(record)
