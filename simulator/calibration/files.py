"""Calibrations as files: those that ship, the user's own, and any path."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Final

import flopwright
from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.simulator.calibration.identity import with_id
from flopwright.simulator.calibration.model import Calibration
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.load import dump_yaml
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml

# Fitted seeds of public tables, one file a GPU.
SHIPPED: Final = Path(flopwright.__file__).parent / "simulator" / "hardware" / "efficiency"
_SUFFIXES: Final = {".yaml", ".yml", ".json"}


def own_folder() -> Path:
    """Returns the folder of the user's own calibrations (it may not exist yet)."""
    home = os.environ.get("FLOPWRIGHT_HOME")
    base = Path(home).expanduser() if home else Path.home() / ".local/share/flopwright"
    return base / "calibrations"


def own_calibrations() -> list[Calibration]:
    """Returns the user's own calibrations, the newest first; files that are none are skipped."""
    found = []
    for path in sorted(own_folder().glob("*.yaml")):
        try:
            found.append(read_calibration(path))
        except InputError:
            continue
    return sorted(found, key=lambda c: c.created, reverse=True)


def shipped_calibration_ids() -> tuple[str, ...]:
    """Returns the ids of the calibrations that ship with the tool, sorted."""
    return tuple(sorted(c.id for c in _shipped()))


def _shipped() -> Iterator[Calibration]:
    for path in sorted(SHIPPED.glob("*.yaml")):
        yield read_calibration(path)


def read_calibration(path: Path) -> Calibration:
    """Returns the calibration in a YAML or JSON file.

    Raises:
        InputError: the file cannot be read or is not a calibration; with line and field.
    """
    return validate(Calibration, read_yaml(path))


def load_calibration(path_or_id: str | Path) -> Calibration:
    """Returns a calibration by path, or by the id of a shipped or own one.

    Raises:
        InputError: no such file or id, or the file is not a calibration.
    """
    text = str(path_or_id)
    if Path(text).suffix in _SUFFIXES:
        return read_calibration(Path(text))
    own = own_folder() / f"{text}.yaml"
    if Path(text).name == text and own.is_file():
        return read_calibration(own)
    known = {c.id: c for c in _shipped()}
    if text in known:
        return known[text]
    own_ids = [p.stem for p in own_folder().glob("*.yaml")]
    raise InputError(
        Violation(
            field="calibration",
            value=repr(text),
            rule="neither a .yaml or .json file nor the id of a calibration",
            nearest_fix=did_you_mean(text, [*known, *own_ids]),
        )
    )


def save_calibration(calibration: Calibration, path: Path | None = None) -> Path:
    """Writes a calibration in one piece and returns where it stands.

    Args:
        calibration: what to write.
        path: a .yaml or .json file; None is the user's own folder, named by the id.
    """
    target = path or own_folder() / f"{calibration.id}.yaml"
    if target.suffix not in _SUFFIXES:
        raise InputError(
            Violation(
                field="out",
                value=str(target),
                rule="a calibration is written as YAML or JSON",
                nearest_fix=f"use {target.name}.yaml",
            )
        )
    text = (
        calibration.model_dump_json(by_alias=True, exclude_none=True, indent=1)
        if target.suffix == ".json"
        else dump_yaml(calibration, header=f"{calibration.source}")
    )
    write_atomically(target, text)
    return target


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes a file so that it is there whole or not at all, with the mode of the umask.

    Args:
        path: the file; its folder is made where it is missing.
        content: text (written as UTF-8) or bytes.

    Raises:
        InputError: the folder cannot be made or the file cannot be written.
    """
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    # Not tempfile.mkstemp: its files are readable by their owner alone.
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(data)
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            Violation(file=str(path), rule=f"cannot write the file: {error.strerror}")
        ) from error
    finally:
        # Where the folder itself is a file, even looking fails.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@lru_cache(maxsize=64)
def _unchanged(path: Path, modified_ns: int) -> Calibration:
    """Returns a shipped calibration, read once: many plans are priced with one prior."""
    return read_calibration(path)


def default_calibration(gpu: GpuSpec) -> Calibration:
    """Returns the public prior for a GPU: its own shipped seed, its kind's, or the bare one.

    The bare one holds no curves: the simulator then takes the defaults of EfficiencyCurve
    on the datasheet's peaks, and a factor of 1.6 either way for the interval.
    """
    for name in (gpu.name, gpu.kind):
        path = SHIPPED / f"{name}.yaml"
        if path.is_file():
            return _unchanged(path, path.stat().st_mtime_ns)
    bare = Calibration(
        id="bare",
        created="",
        source=f"no calibration is shipped for {gpu.name}: default efficiencies, assumed",
        host_floor_s=gpu.launch_floor_s,
        step_residual_log=0.37,
    )
    return with_id(bare, f"prior-{gpu.kind}")


# What a stack adds to, entry by entry; its other fields that are given replace the prior's.
_BY_CLASS: Final = (
    "factors",
    "factor_log_std",
    "memory_factors",
    "hidden_share",
    "kernel_factors",
    "layer_host_s",
    "overlap_slowdown",
    "sources",
)


def with_stack(prior: Calibration, stack: Calibration) -> Calibration:
    """Returns a software stack laid over a GPU's prior.

    Fields that the stack sets replace the prior's; in tables by class its entries replace or
    join the prior's, curves of the same class, dtype and phase are replaced, and the
    measurements stay the prior's. The id names both.
    """
    given = {name: getattr(stack, name) for name in stack.model_fields_set}
    for name in _BY_CLASS:
        given[name] = {**getattr(prior, name), **getattr(stack, name)}
    own = {(c.kind, c.dtype, c.phase) for c in stack.curves}
    kept = (c for c in prior.curves if (c.kind, c.dtype, c.phase) not in own)
    given["curves"] = (*kept, *stack.curves)
    given["collectives"] = stack.collectives or prior.collectives
    given["id"] = f"{prior.id}+{stack.id}"
    given["created"] = max(prior.created, stack.created)
    given["source"] = f"{prior.source}; {stack.source}" if prior.source else stack.source
    given["base"] = prior.id
    return prior.model_copy(update=given)
