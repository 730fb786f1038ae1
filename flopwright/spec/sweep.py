"""The points of a scenario's `sweep:` block: the scenario once for every combination of values.

A block gives lists of values by dotted field, as the fields stand in a file:
`cluster.num_nodes: [1, 2]`, `workload.seq_len: [4096, 8192]`, `model: [llama31_8b, qwen3_8b]`.
Where one field holds another (`cluster`, `cluster.num_nodes`), the outer one is set first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.spec.changed import Values, changed_data
from flopwright.spec.load import SCENARIO_CATALOG, load_scenario, scenario_from
from flopwright.spec.scenario import Scenario
from flopwright.spec.yaml_lines import Document, read_yaml

MAX_POINTS: Final = 10_000
# What a point cannot change.
_NOT_SWEPT: Final = ("sweep", "name", "description")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One combination: its place in the grid, the values of the swept fields, the scenario."""

    index: int
    values: Values
    scenario: Scenario


def load_sweep(name_or_path: str | Path) -> tuple[SweepPoint, ...]:
    """Returns the points of a scenario's sweep, the last field changing fastest.

    Raises:
        InputError: every violation of the file; or of the block and of all its points.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        load_scenario(name_or_path)  # refuses an unknown name
        path = SCENARIO_CATALOG / f"{name_or_path}.yaml"
    document = read_yaml(path)
    lines = dict(document.lines)
    return sweep_points(scenario_from(document), replace(document, lines=lines))


def sweep_points(scenario: Scenario, source: Document | None = None) -> tuple[SweepPoint, ...]:
    """Returns the points of the scenario's sweep.

    Args:
        source: where the scenario was read from: its folder is where files are looked for,
            and its lines are named in violations.

    Raises:
        InputError: every violation of the block, or of all points.
    """
    source = source or Document(data=None, lines={}, file="")
    data = scenario.to_data()
    grid = data.pop("sweep", {})
    broken = dict.fromkeys(_block_violations(scenario, source))
    if math.prod(map(len, grid.values())) > MAX_POINTS:
        raise InputError(broken)
    # What is wrong with the block itself hides nothing that is wrong with the values.
    grid = {k: v for k, v in grid.items() if v and k.split(".")[0] not in _NOT_SWEPT}
    points = []
    for index, chosen in enumerate(itertools.product(*grid.values())):
        values = dict(zip(grid, chosen, strict=True))
        try:
            made = changed_data(data, values, source, place=("sweep",))
            points.append(SweepPoint(index=index, values=values, scenario=made))
        except InputError as error:
            broken.update(dict.fromkeys(error.violations))
    if broken:
        raise InputError(broken)
    return tuple(points)


def _block_violations(scenario: Scenario, source: Document) -> Iterator[Violation]:
    def wrong(field: str, rule: str, value: str = "", fix: str = "") -> Violation:
        line = source.line_of(("sweep", field) if field else ("sweep",))
        name = f"sweep.{field}" if field else "sweep"
        return Violation(
            field=name, value=value, rule=rule, nearest_fix=fix, file=source.file, line=line
        )

    if not scenario.sweep:
        example = "add 'sweep:' with lists by dotted field, such as workload.seq_len: [4096, 8192]"
        yield wrong("", "the scenario sweeps nothing", fix=example)
    for field, values in scenario.sweep.items():
        if field.split(".")[0] in _NOT_SWEPT:
            yield wrong(field, "cannot be swept")
        if not values:
            yield wrong(field, "an empty list", fix="give at least one value")
        twice = [v for i, v in enumerate(values) if v in values[:i]]
        if twice:
            yield wrong(field, "a value stands twice", value=repr(twice[0]))
    points = math.prod(len(v) for v in scenario.sweep.values())
    if points > MAX_POINTS:
        yield replace(
            wrong("", "too many points", value=f"{points:,} points"), limit=f"{MAX_POINTS:,}"
        )
