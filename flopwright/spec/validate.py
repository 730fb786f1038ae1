"""From plain data to a record, with every violation at once: line, field, rule, nearest fix."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.base import BrokenRulesError, Spec
from flopwright.spec.yaml_lines import Document, KeyPath

S = TypeVar("S", bound=Spec)


def validate(model: type[S], document: Document) -> S:
    """Returns the document as a `model`.

    Raises:
        InputError: with one violation for every field that is wrong.
    """
    if not isinstance(document.data, dict):
        raise InputError(
            Violation(
                file=document.file,
                rule=f"expected a mapping of keys ({model.__name__})",
                value=type(document.data).__name__,
            )
        )
    truths = list(_truths(model, document.data, (), document))
    try:
        record = model.model_validate(document.data)
    except ValidationError as error:
        known = {v.field for v in truths}
        others = [v for detail in error.errors() for v in _violations(model, document, detail)]
        raise InputError([*truths, *(v for v in others if v.field not in known)]) from error
    if truths:
        raise InputError(truths)
    return record


def _truths(annotation: Any, value: Any, path: KeyPath, document: Document) -> Iterator[Violation]:
    """Yields each true or false that stands for a number: pydantic would read it as 1 or 0."""
    if isinstance(value, bool) and not _may_hold_truth(annotation):
        yield Violation(
            rule="expected a number or a text, found true or false",
            field=".".join(map(str, path)),
            value=str(value).lower(),
            nearest_fix="write the number",
            file=document.file,
            line=document.line_of(path),
        )
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _truths(annotation, item, (*path, i), document)
    elif isinstance(value, dict):
        owners = _models_in(annotation)
        owners = [m for m in owners if value.get("kind") in _tags(m)] or owners
        for key, item in value.items():
            for field in _fields_called(key, owners)[:1]:
                yield from _truths(field.annotation, item, (*path, key), document)


def _may_hold_truth(annotation: Any) -> bool:
    """Returns whether bool, or anything at all, stands somewhere in an annotation."""
    if annotation in (bool, Any, object):
        return True
    return any(_may_hold_truth(part) for part in get_args(annotation))


def _fields_called(key: Any, owners: Iterable[type[BaseModel]]) -> list[FieldInfo]:
    """Returns the fields that a file calls `key`."""
    return [f for m in owners for n, f in m.model_fields.items() if key in (n, f.alias)]


def _violations(
    model: type[BaseModel], document: Document, detail: ErrorDetails
) -> list[Violation]:
    """Returns what one of pydantic's errors says: a record may break several rules at once."""
    one = _violation(model, document, detail)
    broken = detail.get("ctx", {}).get("error")
    if not isinstance(broken, BrokenRulesError):
        return [one]
    return [dataclasses.replace(one, rule=text) for text in broken.texts]


def _violation(model: type[BaseModel], document: Document, detail: ErrorDetails) -> Violation:
    path, owner = _resolve(model, detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    field, line = ".".join(map(str, path)), document.line_of(path)
    # A rule of a whole record names its fields itself; its "value" would only be the type.
    found = detail.get("input")
    whole = kind in {"missing", "extra_forbidden"} or isinstance(found, (dict, list, BaseModel))
    value = "" if whole else _short(found)
    rule, fix = str(detail["msg"]).removeprefix("Value error, "), ""
    if kind == "extra_forbidden":
        rule, fix = "unknown key", did_you_mean(str(path[-1]), _keys(owner)) if owner else ""
    elif kind == "missing":
        rule, fix = "a required key is missing", f"add '{path[-1]}:'"
    elif kind == "literal_error":
        choices = [
            c.strip("'")
            for c in str(context.get("expected", "")).replace(" or ", ", ").split(", ")
        ]
        rule, fix = "not one of the choices", did_you_mean(str(detail.get("input")), choices)
    elif kind in {"union_tag_invalid", "union_tag_not_found"}:
        rule = "'kind' must name one of " + str(context.get("expected_tags", "the known kinds"))
        fix = did_you_mean(
            str(context.get("tag", "")),
            str(context.get("expected_tags", "")).replace("'", "").split(", "),
        )
    return Violation(
        rule=rule, field=field, value=value, nearest_fix=fix, file=document.file, line=line
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """Returns the record types that an annotation can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in {
        typing.Union,
        types.UnionType,
        typing.Annotated,
        tuple,
        list,
        dict,
    }:
        return [m for arg in get_args(annotation) for m in _models_in(arg)]
    return []


def _resolve(
    model: type[BaseModel], loc: tuple[str | int, ...]
) -> tuple[KeyPath, type[BaseModel] | None]:
    """Returns the file's key path for pydantic's location, and the record that owns its last key.

    pydantic puts the tag of a discriminated union into the location; files do not have it.
    """
    path: list[str | int] = []
    owners: list[type[BaseModel]] = [model]
    owner: type[BaseModel] | None = model
    for part in loc:
        tagged = [m for m in owners if part in _tags(m)]
        if tagged and len(owners) > 1:
            owners = tagged
            continue
        path.append(part)
        owner = owners[0] if len(owners) == 1 else owner
        if isinstance(part, int):
            continue
        fields = _fields_called(part, owners)
        owners = _models_in(fields[0].annotation) if fields else []
    return tuple(path), owner


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()
