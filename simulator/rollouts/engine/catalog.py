"""Served models by name: those that ship as such, and every model of the catalog."""

from __future__ import annotations

from pathlib import Path
from typing import Final, cast, get_args

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.load import SCENARIO_CATALOG, load_model
from flopwright.spec.rollouts.engine_served import (
    CacheType,
    FormatName,
    ServedModel,
    ServedRole,
    served_model,
)
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

SERVED_CATALOG: Final = SCENARIO_CATALOG / "serving" / "models"


def served_model_names() -> tuple[str, ...]:
    """Returns the names of the served models that ship, sorted."""
    return tuple(sorted(p.stem for p in SERVED_CATALOG.glob("*.yaml")))


def named_formats(
    release: str | None, kv_dtype: str | None
) -> tuple[FormatName | None, CacheType | None]:
    """Returns the formats that a user named, checked.

    Raises:
        InputError: a format that there is not.
    """
    found = []
    for field, value, known in (
        ("--release", release, get_args(FormatName)),
        ("--kv", kv_dtype, get_args(CacheType)),
    ):
        if value is not None and value not in known:
            found.append(
                Violation(
                    field=field,
                    value=value,
                    rule="no such format",
                    nearest_fix=did_you_mean(value, known),
                )
            )
    if found:
        raise InputError(found)
    return cast("FormatName | None", release), cast("CacheType | None", kv_dtype)


def load_served(
    name_or_path: str,
    release: FormatName | None = None,
    kv_dtype: CacheType | None = None,
    formats: dict[ServedRole, FormatName] | None = None,
) -> ServedModel:
    """Returns a served model: one that ships, a file of one, or a model of the catalog.

    Args:
        release: format of its matrices; None: as the served model says, bf16 of a catalog one.
        kv_dtype: of its cache; None: as it says, bf16 of a catalog one.
        formats: by role, laid over the release's.

    Raises:
        InputError: no such model, or a file that is none.
    """
    path = Path(name_or_path)
    if name_or_path in served_model_names():
        path = SERVED_CATALOG / f"{name_or_path}.yaml"
    document = read_yaml(path) if path.suffix in {".yaml", ".yml"} and path.is_file() else None
    if document is not None and "layers" in document.data:
        model = validate(ServedModel, document)
        if release is not None:
            model = model.in_format(release)
    else:
        model = served_model(load_model(name_or_path), release or "bf16")
    changes: dict[str, object] = {"formats": {**model.formats, **(formats or {})}}
    if kv_dtype is not None:
        changes["kv_dtype"] = kv_dtype
    return model.model_copy(update=changes)
