"""From plain data to a record, with every violation at once: line, field, rule, nearest fix."""

from __future__ import annotations

import types
import typing
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.base import Spec
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
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        raise InputError(
            [_violation(model, document, detail) for detail in error.errors()]
        ) from error


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
        field = next(
            (f for m in owners for n, f in m.model_fields.items() if part in (n, f.alias)), None
        )
        owners = _models_in(field.annotation) if field is not None else []
    return tuple(path), owner


def _tags(model: type[BaseModel]) -> tuple[Any, ...]:
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()
