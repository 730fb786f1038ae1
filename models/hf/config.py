"""A Hugging Face config.json becomes a ModelSpec, and back. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.models.hf.families import FAMILIES, HARMLESS, Family
from flopwright.models.hf.fields import Fields, read_json
from flopwright.spec.model import ModelSpec
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document

CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """A model read from a config.

    Attributes:
        notes: what the config says that the model leaves out, in words.
    """

    spec: ModelSpec
    notes: tuple[str, ...]


def import_config(
    config: Mapping[str, Any] | str | Path, name: str | None = None
) -> ImportedModel:
    """Returns the model of a config.json, with what was left out.

    Args:
        config: the parsed object, its file, or the folder that holds it.
        name: of the model; by default the config's own, or the folder's, or the model_type.

    Raises:
        InputError: unreadable file, an unknown architecture, and every field that is unknown,
            missing or says what a ModelSpec cannot represent, each with its value.
    """
    file, default_name = "", ""
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / CONFIG_FILE if path.is_dir() else path
        file, default_name = str(path), path.resolve().parent.name
        config = read_json(path)
    family = _family(config, file)
    fields = Fields(config, file)
    fields.harmless(HARMLESS)
    data = family.read(fields)
    if fields.section("quantization_config") is not None:
        fields.notes.append("weights as they are before quantization (quantization_config)")
    fields.finish()
    own_name = str(config.get("_name_or_path") or "").rstrip("/").rsplit("/", 1)[-1]
    model_type = str(config.get("model_type") or family.name)
    source = "; ".join((f"config.json of model_type {model_type}", *fields.notes))
    head = {
        "name": name or own_name or default_name or model_type,
        "family": family.name,
        "source": source,
    }
    spec = validate(ModelSpec, Document(data={**head, **data}, lines={}, file=file))
    return ImportedModel(spec, tuple(fields.notes))


def model_from_hf_config(
    config: Mapping[str, Any] | str | Path, name: str | None = None
) -> ModelSpec:
    """Returns the model of a config.json; see `import_config`."""
    return import_config(config, name).spec


def _family(config: Mapping[str, Any], file: str) -> Family:
    """Returns the family that a config names."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    named = classes[0] if isinstance(classes, list) and classes else None
    if model_type is None:
        found = next((f for f in FAMILIES.values() if named in f.architectures), None)
    else:
        found = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    field, value = ("model_type", model_type) if model_type else ("architectures", named)
    if found is None:
        raise InputError(
            Violation(
                file=file,
                field=field,
                value=repr(value),
                rule="no such architecture is known",
                nearest_fix=did_you_mean(str(value), FAMILIES),
            )
        )
    if classes is not None and named not in found.architectures:
        raise InputError(
            Violation(
                file=file,
                field="architectures",
                value=repr(classes),
                rule=f"not a language model of family {found.name}",
                limit=" or ".join(found.architectures),
            )
        )
    return found
