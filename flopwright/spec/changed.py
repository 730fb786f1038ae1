"""A scenario with some of its fields changed, by dotted name: `workload.seq_len=8192`.

Fields are named as they stand in a file; `model`, `cluster` and `cluster.node.gpu` may be a
name of the catalog (or, where files are allowed, a file). Where one field holds another
(`cluster`, `cluster.num_nodes`), the outer one is set first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.spec.base import Spec
from flopwright.spec.load import load_cluster, load_gpu, load_model
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document, KeyPath, parse_yaml

Values = dict[str, Any]
# Fields whose value may be a name in the catalog or a file.
_REFERENCES: Final[dict[str, Callable[[str | Path], Spec]]] = {
    "model": load_model,
    "cluster": load_cluster,
    "cluster.node.gpu": load_gpu,
}


def changed(scenario: Scenario, values: Values, *, files: bool = True) -> Scenario:
    """Returns the scenario with the values in place of its own.

    Args:
        files: whether a reference may be a file; an upload may name the catalogs only.

    Raises:
        InputError: every value that does not fit its field, or the scenario as a whole.
    """
    if not values:
        return scenario
    found = [
        Violation(
            field=field,
            value=repr(value),
            rule="cannot refer to files here",
            nearest_fix="use a name of the catalog",
        )
        for field, value in values.items()
        if not files and field in _REFERENCES and str(value).endswith((".yaml", ".yml"))
    ]
    if found:
        raise InputError(found)
    return changed_data(scenario.to_data(), values, Document(data=None, lines={}, file=""))


def parse_changes(words: Sequence[str]) -> Values:
    """Returns `field=value` words as values by field; a value is read as YAML.

    Raises:
        InputError: every word without a value, with broken YAML or for a field given twice.
    """
    out: Values = {}
    found = []
    for word in words:
        field, equals, text = word.partition("=")
        rule = "" if equals and field else "needs a field and a value"
        if not rule and field in out:
            rule = f"{field} is set twice"
        value = None
        if not rule:
            try:
                value = parse_yaml(f"value: {text}", "").data["value"]
            except (InputError, KeyError, TypeError):
                rule = "the value is not one YAML value"
        if rule:
            fix = "write FIELD=VALUE, such as workload.seq_len=8192 or cluster=64_h100"
            found.append(Violation(field="--set", value=word, rule=rule, nearest_fix=fix))
        else:
            out[field] = value
    if found:
        raise InputError(found)
    return out


def changed_data(
    base: dict[str, Any], values: Values, source: Document, place: KeyPath = ()
) -> Scenario:
    """Returns the scenario of `base` with the values set.

    Args:
        source: where the values stand: its folder is where files are looked for.
        place: where in it, so that its lines can be named in violations.
    """
    data, lines = copy.deepcopy(base), dict[KeyPath, int]()
    found: list[Violation] = []
    for field in sorted(values, key=lambda name: name.count(".")):
        path: KeyPath = tuple(field.split("."))
        lines[path] = source.line_of((*place, field))
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


def changed_document(document: Document, values: Values) -> Document:
    """Returns a document of any kind with values set; names of catalogs are resolved later.

    Raises:
        InputError: every value whose field lies in something that holds no fields.
    """
    data, lines = copy.deepcopy(document.data), dict(document.lines)
    found: list[Violation] = []
    for field in sorted(values, key=lambda name: name.count(".")):
        path: KeyPath = tuple(field.split("."))
        lines[path] = 0
        try:
            _put(data, path, values[field])
        except InputError as error:
            found += error.violations
    if found:
        raise InputError(found)
    return Document(data=data, lines=lines, file=document.file)


def _resolved(field: str, value: Any, source: Document) -> Any:
    load = _REFERENCES.get(field)
    if load is None or not isinstance(value, str):
        return value
    is_file = value.endswith((".yaml", ".yml"))
    return load(Path(source.file).parent / value if is_file else value).to_data()


def _put(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Sets the field at `path`; what stands on the way and is no record is a violation."""
    parent: Any = data
    if not isinstance(data, dict):
        raise InputError(Violation(field=str(path[0]), rule="the file holds no fields"))
    for key in path[:-1]:
        parent = parent.setdefault(key, {})
        if not isinstance(parent, dict):
            name = ".".join(map(str, path))
            raise InputError(Violation(field=name, rule=f"'{key}' holds no fields"))
    parent[path[-1]] = value
