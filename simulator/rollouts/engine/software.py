"""What each engine does: one YAML file an engine, every number with its source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import flopwright
from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.spec.rollouts.engine_served import EngineSoftware
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

FOLDER: Final = Path(flopwright.__file__).parent / "simulator" / "hardware" / "engines"


def engine_names() -> tuple[str, ...]:
    """Returns the names of the engines that ship, sorted."""
    return tuple(sorted(p.stem for p in FOLDER.glob("*.yaml")))


@lru_cache(maxsize=32)
def engine_software(name: str) -> EngineSoftware:
    """Returns an engine by name.

    Raises:
        InputError: no such engine.
    """
    if name not in engine_names():
        raise InputError(
            Violation(
                field="engine",
                value=repr(name),
                rule="no such engine",
                nearest_fix=did_you_mean(name, engine_names()),
            )
        )
    return validate(EngineSoftware, read_yaml(FOLDER / f"{name}.yaml"))
