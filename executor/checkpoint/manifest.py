"""What a checkpoint folder holds, and how a broken one is refused.

    checkpoint-NAME/
      step-00000300/
        manifest.json          everything below, with sha256
        tokenizer.json
        rank-00000.safetensors  what rank 0 wrote: boxes of tensors
        rank-00001.safetensors
        ...

A `step-` folder is complete or not there: it is written under another name and renamed.
Only JSON and safetensors are read; nothing in a checkpoint is ever executed. Tensors are
named and cut without regard to the plan that wrote them, so that any plan can read them:
weights by their own names, what an optimizer keeps of them as `optimizer.KIND.NAME`, and
copies wider than the weights as `master.NAME`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from flopwright.errors import InputError, Violation
from flopwright.spec.base import Spec
from flopwright.spec.model import ModelSpec

MANIFEST_FILE: Final = "manifest.json"
TOKENIZER_FILE: Final = "tokenizer.json"
MAX_MANIFEST_BYTES: Final = 256 * 2**20
_STEP: Final = re.compile(r"step-(\d{8,})")
_CHUNK: Final = 2**22


class Piece(Spec):
    """A box of a tensor in a file, under a key of its own.

    Attributes:
        offsets: of its first element in the whole tensor.
        crc32: of its bytes, to say which tensor of a broken file is broken.
    """

    tensor: str
    offsets: tuple[NonNegativeInt, ...]
    shape: tuple[NonNegativeInt, ...]
    crc32: NonNegativeInt


class TensorEntry(Spec):
    """A whole tensor."""

    dtype: str
    shape: tuple[NonNegativeInt, ...]


class FileEntry(Spec):
    """One rank's file.

    Attributes:
        pieces: by their keys in the file.
        tensors: what the pieces are of.
        scalars: single numbers that stand beside tensors, such as an optimizer's step count.
    """

    file: str = Field(pattern=r"^rank-\d{5}\.safetensors$")
    sha256: str
    size: NonNegativeInt
    pieces: dict[str, Piece]
    tensors: dict[str, TensorEntry]
    scalars: dict[str, float] = Field(default_factory=dict)


class Manifest(Spec):
    """The record of a checkpoint.

    Attributes:
        step: optimizer steps done.
        seed: seed of the run: weights and order of samples.
        plan: the parallel plan's data, where there was one.
        world_size: ranks that wrote it.
        state: what else the run goes on from.
        files: by rank.
    """

    schema_version: Literal[2] = 2
    tool_version: str
    step: NonNegativeInt
    seed: NonNegativeInt
    model: ModelSpec
    model_hash: str
    tokenizer_hash: str
    tokenizer_sha256: str
    plan: dict[str, Any] | None = None
    world_size: PositiveInt
    state: dict[str, Any] = Field(default_factory=dict)
    files: tuple[FileEntry, ...]

    def tensors(self) -> dict[str, TensorEntry]:
        """Returns the tensors of all files by name."""
        return {name: entry for file in self.files for name, entry in file.tensors.items()}

    def scalars(self) -> dict[str, float]:
        """Returns the numbers of all files by name."""
        return {name: value for file in self.files for name, value in file.scalars.items()}


def step_folder(step: int) -> str:
    """Returns the name of a step's folder."""
    return f"step-{step:08d}"


def steps_of(folder: Path) -> list[int]:
    """Returns the steps a checkpoint folder holds, oldest first."""
    if not folder.is_dir():
        return []
    found = [_STEP.fullmatch(p.name) for p in folder.iterdir() if (p / MANIFEST_FILE).is_file()]
    return sorted(int(m.group(1)) for m in found if m)


def find_checkpoint(path: Path, step: int | None = None) -> Path:
    """Returns the step folder meant by a run's folder, a checkpoint folder or a step folder.

    Raises:
        InputError: there is none, or a run has several checkpoints to choose from.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    if not path.is_dir():
        raise InputError(
            Violation(
                value=str(path),
                rule="no such folder",
                nearest_fix="name the folder of a run, or one of its checkpoints",
            )
        )
    steps = steps_of(path)
    if steps:
        if step is not None and step not in steps:
            raise InputError(
                Violation(
                    field="step",
                    value=str(step),
                    rule=f"no checkpoint of that step in {path}",
                    nearest_fix=f"steps there: {', '.join(map(str, steps))}",
                )
            )
        return path / step_folder(steps[-1] if step is None else step)
    runs = sorted(p for p in path.glob("checkpoint*") if steps_of(p))
    if len(runs) == 1:
        return find_checkpoint(runs[0], step)
    names = ", ".join(p.name for p in runs)
    raise InputError(
        Violation(
            value=str(path),
            rule="several checkpoints in the folder" if runs else "no checkpoint in the folder",
            nearest_fix=f"name one of: {names}" if runs else "train one with `flopwright run`",
        )
    )


def manifest_text(manifest: Manifest) -> str:
    """Returns the contents of manifest.json: the record and its own sha256."""
    body = manifest.model_dump(mode="json", by_alias=True)
    return json.dumps({"sha256": _hash_json(body), "manifest": body}, indent=1)


def read_manifest(folder: Path) -> Manifest:
    """Returns the record of a step folder.

    Raises:
        InputError: missing, broken or altered.
    """
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise _broken(path, "too large")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _broken(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _broken(path, "truncated or not JSON") from error
    body = data.get("manifest") if isinstance(data, dict) else None
    if not isinstance(body, dict) or _hash_json(body) != data.get("sha256"):
        raise _broken(path, "altered or truncated: its sha256 does not match")
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        raise _broken(path, "not a checkpoint of this version of flopwright") from error
    if manifest.world_size != len(manifest.files):
        raise _broken(path, f"{len(manifest.files)} files of {manifest.world_size} ranks")
    problem = _torn(manifest)
    if problem:
        raise _broken(path, problem)
    return manifest


def _torn(manifest: Manifest) -> str:
    """Returns which tensor's pieces do not make it up; "" where all do."""
    tensors, held = manifest.tensors(), dict.fromkeys(manifest.tensors(), 0)
    for file in manifest.files:
        for piece in file.pieces.values():
            entry = tensors.get(piece.tensor)
            inside = entry is not None and len(entry.shape) == len(piece.shape)
            if entry is None or not inside or not _fits(piece, entry):
                return f"{piece.tensor}: a piece does not lie inside it"
            held[piece.tensor] += math.prod(piece.shape)
    for name, entry in tensors.items():
        if held[name] != math.prod(entry.shape):
            return f"{name}: its pieces hold {held[name]} of {math.prod(entry.shape)} numbers"
    return ""


def _fits(piece: Piece, entry: TensorEntry) -> bool:
    triples = zip(piece.offsets, piece.shape, entry.shape, strict=True)
    return all(offset + size <= length for offset, size, length in triples)


def check_hashes(
    manifest: Manifest,
    folder: Path,
    expected_model_hash: str | None,
    expected_tokenizer_hash: str | None,
) -> None:
    """Refuses a checkpoint of another model or tokenizer; None is not checked.

    Raises:
        InputError: with one violation for each that differs.
    """
    pairs = (
        ("model_hash", manifest.model_hash, expected_model_hash, "model"),
        ("tokenizer_hash", manifest.tokenizer_hash, expected_tokenizer_hash, "tokenizer"),
    )
    wrong = [
        Violation(
            file=str(folder / MANIFEST_FILE),
            field=field,
            value=found[:16],
            rule=f"the checkpoint was made with another {what} (expected {expected[:16]})",
            nearest_fix=f"use the {what} of the run, or start a new run",
        )
        for field, found, expected, what in pairs
        if expected is not None and found != expected
    ]
    if wrong:
        raise InputError(wrong)


def file_sha256(path: Path) -> str:
    """Returns the sha256 (hex) of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _hash_json(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _broken(path: Path, rule: str) -> InputError:
    return InputError(
        Violation(
            file=str(path),
            rule=rule,
            nearest_fix=f"remove {path.parent.name}: the one before it is then gone on from",
        )
    )
