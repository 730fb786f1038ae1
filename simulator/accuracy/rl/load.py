"""A directory of published RL scenarios, every file checked before any is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import flopwright
from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.simulator.accuracy.rl.schema import CHECK, RlScenario, ScoredRow
from flopwright.spec.load import MODEL_CATALOG, _inline
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document, read_yaml

FOLDER: Final = Path(flopwright.__file__).parent / "scenarios" / "published_rl"
_MODEL: Final = ("experiment", "model")


def load_scenarios(folder: Path) -> dict[str, RlScenario]:
    """Returns the scenarios of a directory by name.

    Raises:
        InputError: every violation of every file, names and rows that stand twice, and
            references to scenarios that are not there.
    """
    if not folder.is_dir():
        raise InputError(
            Violation(field="--scenarios", value=str(folder), rule="is not a directory")
        )
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise InputError(
            Violation(field="--scenarios", value=str(folder), rule="holds no .yaml files")
        )
    found: dict[str, RlScenario] = {}
    broken: list[Violation] = []
    where: dict[str, Path] = {}
    for path in paths:
        try:
            scenario = scenario_from(read_yaml(path))
        except InputError as error:
            broken.extend(error.violations)
            continue
        if scenario.name in found:
            rule = f"the name stands in {where[scenario.name].name} too"
            broken.append(Violation(file=str(path), field="name", value=scenario.name, rule=rule))
            continue
        found[scenario.name], where[scenario.name] = scenario, path
    broken.extend(_rows_twice(found, where))
    if not broken:
        broken.extend(_references(found, where))
    if broken:
        raise InputError(broken)
    return found


def scenario_from(document: Document) -> RlScenario:
    """Returns the document as a scenario; the model may be a name of the catalog."""
    data: Any = document.data
    experiment = data.get("experiment") if isinstance(data, dict) else None
    # an engine alone names its model by itself: its own catalog has more of them
    if isinstance(experiment, dict) and experiment.get("kind") != "engine":
        _inline(document, _MODEL, MODEL_CATALOG, "model")
    return validate(RlScenario, document)


def _rows_twice(found: dict[str, RlScenario], where: dict[str, Path]) -> list[Violation]:
    """A row has one class and one scenario; only its parts may stand in several."""
    seen: dict[tuple[str, int | None], str] = {}
    out = []
    for name, scenario in found.items():
        for row in scenario.rows:
            first = seen.setdefault((row.id, row.part), name)
            if first != name:
                rule = f"the row stands in scenario {first} too"
                out.append(Violation(file=str(where[name]), field="rows", value=row.id, rule=rule))
    return out


def _references(found: dict[str, RlScenario], where: dict[str, Path]) -> list[Violation]:
    out = []
    for name, scenario in found.items():
        file = str(where[name])
        named = [(f"rows.{r.id}", ref) for r in scenario.rows for ref in _named(r)]
        named += [("fits.scenario", f.scenario) for f in scenario.fits if f.scenario is not None]
        for field, other in named:
            if other not in found:
                fix = did_you_mean(other, found)
                out.append(Violation(file=file, field=field, value=other,
                                     rule="no such scenario here", nearest_fix=fix))  # fmt: skip
    return out


def _named(row: ScoredRow) -> list[str]:
    """Returns the scenarios a row refers to."""
    references = [r for r in (row.metric, row.over) if r is not None]
    for check in row.checks:
        match = CHECK.match(check)
        assert match is not None
        references.extend(names_in(check))
    return [r.split(".")[0] for r in references if "." in r]


def names_in(check: str) -> list[str]:
    """Returns the names of a comparison: metrics, scenario.metric, row ids."""
    words = check.replace("<=", " ").replace(">=", " ").replace("<", " ").replace(">", " ")
    return [w for w in words.replace("*", " ").split() if w[0].isalpha()]
