"""Reading a checkpoint: one rank's tensors, or the whole model out of all ranks' files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.manifest import (
    TOKENIZER_FILE,
    Manifest,
    ShardEntry,
    TensorEntry,
    check_hashes,
    file_sha256,
    find_checkpoint,
    read_manifest,
)
from flopwright.executor.checkpoint.save import tensor_crc32


def load(
    folder: Path,
    expected_model_hash: str | None = None,
    expected_tokenizer_hash: str | None = None,
    *,
    rank: int = 0,
    step: int | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any], Manifest]:
    """Returns what one rank saved: its tensors (on the CPU), its state, and the manifest.

    Args:
        folder: a checkpoint folder (its latest step, or `step`), or a step folder.
        expected_model_hash: refused if the checkpoint's differs; None is not checked.
        expected_tokenizer_hash: likewise.
        rank: whose tensors, under the plan that saved them.
        step: which step.

    Raises:
        InputError: another model or tokenizer, no such rank, or a missing, truncated or
            altered file; names the file and the tensor.
    """
    where = find_checkpoint(folder, step)
    manifest = read_manifest(where)
    check_hashes(manifest, where, expected_model_hash, expected_tokenizer_hash)
    if not 0 <= rank < manifest.world_size:
        raise InputError(
            Violation(
                file=str(where),
                field="rank",
                value=str(rank),
                rule=f"the checkpoint was saved by {manifest.world_size} ranks",
                nearest_fix="resume with the plan that saved it",
            )
        )
    shard = manifest.shards[rank]
    return read_shard(where, shard), shard.state, manifest


def load_full(
    folder: Path,
    expected_model_hash: str | None = None,
    expected_tokenizer_hash: str | None = None,
    *,
    step: int | None = None,
) -> tuple[dict[str, Tensor], Manifest]:
    """Returns every tensor whole, put together from all ranks, and the manifest.

    Slices are joined along dimension 0 by their offsets; of copies (data-parallel
    replicas) the lowest rank's is taken. Arguments and errors as for `load`; a tensor with
    a gap between its slices is refused by name.
    """
    where = find_checkpoint(folder, step)
    manifest = read_manifest(where)
    check_hashes(manifest, where, expected_model_hash, expected_tokenizer_hash)
    whole: dict[str, Tensor] = {}
    filled: dict[str, dict[int, int]] = {}  # name -> rows by offset
    for shard in manifest.shards:
        for name, tensor in read_shard(where, shard).items():
            entry = shard.tensors[name]
            if entry.shape == entry.full_shape:
                whole.setdefault(name, tensor)
                continue
            if name not in whole:
                whole[name] = torch.empty(entry.full_shape, dtype=tensor.dtype)
            rows = filled.setdefault(name, {})
            if entry.offset not in rows and _fits(entry, whole[name]):
                whole[name][entry.offset : entry.offset + len(tensor)] = tensor
                rows[entry.offset] = len(tensor)
    _refuse_gaps(where, whole, filled)
    return whole, manifest


def _fits(entry: TensorEntry, whole: Tensor) -> bool:
    return (
        entry.full_shape == tuple(whole.shape)
        and entry.shape[1:] == entry.full_shape[1:]
        and entry.offset + entry.shape[0] <= entry.full_shape[0]
    )


def _refuse_gaps(where: Path, whole: dict[str, Tensor], filled: dict[str, dict[int, int]]) -> None:
    wrong = []
    for name, rows in filled.items():
        end = 0
        for offset, count in sorted(rows.items()):
            end = offset + count if offset == end else -1
        if end != len(whole[name]):
            wrong.append(
                Violation(
                    file=str(where),
                    field=name,
                    value=f"rows at {sorted(rows.items())}",
                    rule=f"the ranks' slices do not make up its {len(whole[name])} rows",
                    nearest_fix="use an earlier checkpoint",
                )
            )
    if wrong:
        raise InputError(wrong)


def read_shard(where: Path, shard: ShardEntry) -> dict[str, Tensor]:
    """Returns the tensors of one rank's file, checked against its record.

    Raises:
        InputError: missing, truncated or altered; names the file and the tensor.
    """
    path = where / shard.file
    if not path.is_file():
        raise _refuse(path, "the file is missing", _first(shard))
    size = path.stat().st_size
    if size != shard.size:
        raise _refuse(path, f"{size} bytes instead of {shard.size}", _first(shard))
    intact = file_sha256(path) == shard.sha256
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise _refuse(path, f"altered: {error}", _first(shard)) from error
    for name, entry in shard.tensors.items():
        tensor = tensors.get(name)
        if (
            tensor is None
            or tuple(tensor.shape) != entry.shape
            or str(tensor.dtype) != f"torch.{entry.dtype}"
            or (not intact and tensor_crc32(tensor) != entry.crc32)
        ):
            raise _refuse(path, "the tensor is missing or altered", name)
    if not intact:
        raise _refuse(path, "altered: its sha256 does not match", _first(shard))
    return tensors


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


def _first(shard: ShardEntry) -> str:
    """Returns a name for the file's tensors: all of one, or the first and how many more."""
    names = list(shard.tensors)
    if not names:
        return ""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _refuse(path: Path, rule: str, tensor: str) -> InputError:
    return InputError(
        Violation(file=str(path), field=tensor, rule=rule, nearest_fix="use an earlier checkpoint")
    )
