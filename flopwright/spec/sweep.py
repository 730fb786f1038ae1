"""The points of a scenario's `sweep:` block: the scenario once for every combination of values.

A block gives lists of values by dotted field, as the fields stand in a file:
`cluster.num_nodes: [1, 2]`, `workload.seq_len: [4096, 8192]`, `model: [llama31_8b, qwen3_8b]`.
Where one field holds another (`cluster`, `cluster.num_nodes`), the outer one is set first.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.spec.base import Spec
from flopwright.spec.load import (
    SCENARIO_CATALOG,
    load_cluster,
    load_gpu,
    load_model,
    load_scenario,
    scenario_from,
)
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document, KeyPath, read_yaml

MAX_POINTS: Final = 10_000
# Fields whose value may be a name in the catalog or a file.
_REFERENCES: Final[dict[str, Callable[[str | Path], Spec]]] = {
    "model": load_model,
    "cluster": load_cluster,
    "cluster.node.gpu": load_gpu,
}
# What a point cannot change.
_NOT_SWEPT: Final = ("sweep", "name", "description")
Values = dict[str, Any]


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
            points.append(
                SweepPoint(index=index, values=values, scenario=_point(data, values, source))
            )
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


def _point(base: dict[str, Any], values: Values, source: Document) -> Scenario:
    """Returns the scenario with the values in place of its own."""
    data, lines = copy.deepcopy(base), dict[KeyPath, int]()
    found: list[Violation] = []
    for field in sorted(values, key=lambda name: name.count(".")):
        path: KeyPath = tuple(field.split("."))
        lines[path] = source.line_of(("sweep", field))
        try:
            _put(data, path, _resolved(field, values[field], source))
        except InputError as error:
            found += [
                replace(v, field=field, file=v.file or source.file, line=v.line or lines[path])
                for v in error.violations
            ]
    try:
        made = validate(Scenario, Document(data=data, lines=lines, file=source.file))
    except InputError as error:
        raise InputError([*found, *error.violations]) from error
    if found:
        raise InputError(found)
    return made


def _resolved(field: str, value: Any, source: Document) -> Any:
    load = _REFERENCES.get(field)
    if load is None or not isinstance(value, str):
        return value
    is_file = value.endswith((".yaml", ".yml"))
    return load(Path(source.file).parent / value if is_file else value).to_data()


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Sets the field at `path`; what stands on the way and is no record is a violation."""
    parent: Any = data
    for key in path[:-1]:
        parent = parent.setdefault(key, {})
        if not isinstance(parent, dict):
            name = ".".join(map(str, path))
            raise InputError(Violation(field=name, rule=f"'{key}' holds no fields"))
    parent[path[-1]] = value
