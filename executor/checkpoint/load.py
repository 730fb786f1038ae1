"""Reading a checkpoint: the boxes that a rank wants, whichever plan wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.boxes import whole
from flopwright.executor.checkpoint.manifest import (
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    check_hashes,
    file_sha256,
    find_checkpoint,
    read_manifest,
)
from flopwright.executor.checkpoint.storage import Slices, tensor_crc32
from flopwright.executor.checkpoint.storage_read import read_slices

# Of the names of what stands beside the weights.
OPTIMIZER: Final = "optimizer."
MASTER: Final = "master."


def load_into(where: Path, manifest: Manifest, slices: Slices) -> None:
    """Fills tensors in place with their boxes of a step folder's tensors.

    Args:
        where: the step folder that `manifest` is of.
        slices: by name, the boxes to fill.

    Raises:
        InputError: a tensor that is not there, or of another shape or format; or a missing,
            truncated or altered file. Nothing has been filled then.
    """
    stored = manifest.tensors()
    wrong = []
    for name, boxes in slices.items():
        for box in boxes[:1]:
            asked = (str(box.tensor.dtype).removeprefix("torch."), tuple(box.full_shape))
            entry = stored.get(name)
            if entry is None or (entry.dtype, entry.shape) != asked:
                there = "nothing" if entry is None else f"{entry.dtype} {entry.shape}"
                rule = f"the checkpoint holds {there} where {asked[0]} {asked[1]} is needed"
                wrong.append(Violation(file=str(where), field=name, rule=rule))
    if wrong:
        raise InputError(wrong[:20])
    check_files(where, _needed(manifest, slices))
    read_slices(where, manifest, slices)


def _needed(manifest: Manifest, slices: Slices) -> list[FileEntry]:
    return [file for file in manifest.files if not slices.keys().isdisjoint(file.tensors)]


def load_full(
    folder: Path,
    expected_model_hash: str | None = None,
    expected_tokenizer_hash: str | None = None,
    *,
    step: int | None = None,
) -> tuple[dict[str, Tensor], Manifest]:
    """Returns every weight whole, on the CPU, and the manifest.

    Args:
        folder: a checkpoint folder (its latest step, or `step`), or a step folder.
        expected_model_hash: refused if the checkpoint's differs; None is not checked.
        expected_tokenizer_hash: likewise.
        step: which step.

    Raises:
        InputError: another model or tokenizer, or a missing, truncated or altered file; names
            the file and the tensor.
    """
    where = find_checkpoint(folder, step)
    manifest = read_manifest(where)
    check_hashes(manifest, where, expected_model_hash, expected_tokenizer_hash)
    tensors = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for name, entry in manifest.tensors().items()
        if not name.startswith((OPTIMIZER, MASTER))
    }
    load_into(where, manifest, {name: (whole(tensor),) for name, tensor in tensors.items()})
    return tensors, manifest


def check_files(where: Path, files: Iterable[FileEntry]) -> None:
    """Refuses files that are not, byte by byte, as they were recorded.

    Raises:
        InputError: missing, truncated or altered; names the file and the tensor.
    """
    for entry in files:
        path = where / entry.file
        if not path.is_file():
            raise _refuse(path, "the file is missing", _first(entry))
        size = path.stat().st_size
        if size != entry.size:
            raise _refuse(path, f"{size} bytes instead of {entry.size}", _first(entry))
        if file_sha256(path) != entry.sha256:
            raise _altered(path, entry)


def _altered(path: Path, entry: FileEntry) -> InputError:
    """Returns the error that names the tensor of an altered file."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        return _refuse(path, f"altered: {error}", _first(entry))
    for key, piece in entry.pieces.items():
        tensor = tensors.get(key)
        if tensor is None or tensor_crc32(tensor) != piece.crc32:
            return _refuse(path, "the tensor is missing or altered", piece.tensor)
    return _refuse(path, "altered: its sha256 does not match", _first(entry))


def checkpoint_tokenizer(where: Path, manifest: Manifest) -> Path:
    """Returns the checkpoint's tokenizer.json, checked against the manifest.

    Raises:
        InputError: missing or altered.
    """
    path = where / TOKENIZER_FILE
    if not path.is_file():
        raise _refuse(path, "the file is missing", "")
    if file_sha256(path) != manifest.tokenizer_sha256:
        raise _refuse(path, "altered: its sha256 does not match", "")
    return path


def _first(entry: FileEntry) -> str:
    """Returns a name for the file's tensors: all of one, or the first and how many more."""
    names = list(entry.tensors)
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _refuse(path: Path, rule: str, tensor: str) -> InputError:
    return InputError(
        Violation(
            file=str(path),
            field=tensor,
            rule=rule,
            nearest_fix=f"remove {path.parent.name}: the one before it is then gone on from",
        )
    )
