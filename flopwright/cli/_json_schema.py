"""JSON Schema of the file kinds, as the readers take them and not only as records stand."""

from __future__ import annotations

import inspect
import re
from typing import Any, Final

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from flopwright.spec.base import Spec

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE: Final = re.compile(r"^    (\w+): (.*)$")


def attribute_texts(record: type) -> dict[str, str]:
    """Returns, by field, what the Attributes sections of a class and its bases say of it."""
    texts: dict[str, str] = {}
    for cls in reversed([c for c in record.__mro__ if issubclass(c, Spec)]):
        _, _, section = (inspect.cleandoc(cls.__doc__ or "")).partition("\nAttributes:\n")
        name = None
        for line in section.splitlines():
            if match := _ATTRIBUTE.match(line):
                name = match.group(1)
                texts[name] = match.group(2)
            elif name is not None and line.startswith("        "):
                texts[name] += f" {line.strip()}"
            else:
                name = None
    return texts


class FileSchema(GenerateJsonSchema):
    """pydantic's schemas, with the fields described and no default that a file cannot hold."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Returns the schema of a record; the class's Attributes section moves to its fields."""
        out = super().model_schema(schema)
        record = schema["cls"]
        if "description" in out:
            out["description"] = out["description"].partition("\n\nAttributes:\n")[0]
        texts = attribute_texts(record)
        for name, field in record.model_fields.items():
            found = out.get("properties", {}).get(field.alias or name)
            if found is None:
                continue
            if name in texts:
                _describe(found, texts[name])
            # A quantity's default is a bare number in the program, but never in a file.
            if found.get("type") == "string" and isinstance(found.get("default"), (int, float)):
                del found["default"]
        return out

    def tagged_union_schema(self, schema: core_schema.TaggedUnionSchema) -> JsonSchemaValue:
        """Returns a union by `kind`; where a file may leave `kind` out, several can match."""
        out = super().tagged_union_schema(schema)
        if "discriminator" not in out and "oneOf" in out:
            out["anyOf"] = out.pop("oneOf")
        return out


def _describe(found: JsonSchemaValue, text: str) -> None:
    unit = found.get("description")
    found["description"] = f"{text} ({unit})" if unit else text


def file_schema(kind: str, record: type[Spec]) -> dict[str, Any]:
    """Returns the JSON Schema of a file kind.

    Args:
        kind: a file kind of `flopwright schema`.
        record: what the file is read into.
    """
    out = record.model_json_schema(by_alias=True, schema_generator=FileSchema)
    for definition in [out, *out.get("$defs", {}).values()]:
        _require_kind(definition, out.get("$defs", {}))
    # A plan file is complete in itself: there nothing may be referred to.
    if kind == "scenario":
        _or_text(out, "model", "name of a catalog model, or the path of a model file (.yaml)")
        _or_text(
            out, "cluster", "name of a catalog cluster, or the path of a cluster file (.yaml)"
        )
    if kind in {"scenario", "cluster"}:
        gpu = "name of a catalog GPU, or the path of a GPU file (.yaml)"
        _or_text(out["$defs"]["NodeSpec"], "gpu", gpu)
    if kind == "loop":
        _loop_names(out, out["$defs"])
    if kind == "experiment":
        for name in ("LoopExperiment", "RanksExperiment"):
            _or_text(out["$defs"][name], "model", "name of a catalog model")
    for definition in (out, out.get("$defs", {}).get("LoopRound", {})):
        if kind in {"rollout", "loop"} and "weight_sync" in definition.get("properties", {}):
            for name in ("update", "weight_sync"):
                _or_text(definition, name, "just the fixed time, e.g. 15 s")
    return {"$schema": DIALECT, **out}


def _loop_names(out: dict[str, Any], parts: dict[str, Any]) -> None:
    """Lets the parts of a loop that stand in catalogs be named."""
    _or_text(out, "cluster", "name of a catalog cluster, or the path of a cluster file (.yaml)")
    gpu = "name of a catalog GPU, or the path of a GPU file (.yaml)"
    _or_text(parts["NodeSpec"], "gpu", gpu)
    for record in ("Serving", "Training"):
        _or_text(parts[record], "model", "name of a catalog model, or the path of a model file")
    _or_text(parts["Serving"], "served", "name of a served model, or the path of its file")


def _or_text(record: dict[str, Any], name: str, text: str) -> None:
    """Lets a field that holds a record be a text as well."""
    found = record["properties"][name]
    own = [{"$ref": found.pop("$ref")}] if "$ref" in found else found.pop("anyOf")
    choices = [*own, {"type": "string", "description": text}]
    record["properties"][name] = {**found, "anyOf": choices}


def _require_kind(definition: dict[str, Any], definitions: dict[str, Any]) -> None:
    """Requires `kind` of the records that are told apart by it: there it has no default."""
    for found in definition.get("properties", {}).values():
        for choice in [found, *found.get("anyOf", [])]:
            for reference in choice.get("discriminator", {}).get("mapping", {}).values():
                member = definitions[reference.removeprefix("#/$defs/")]
                if "kind" in member["properties"]:  # others are told apart by another field
                    member["properties"]["kind"].pop("default", None)
                    member["required"] = sorted({*member.get("required", []), "kind"})
