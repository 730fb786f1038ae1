"""Writing a checkpoint: every rank its own tensors, and the whole folder at once or not at all."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

import flopwright
from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    Manifest,
    ShardEntry,
    TensorEntry,
    file_sha256,
    manifest_text,
    step_folder,
    steps_of,
)
from flopwright.executor.data.tokenizer import load_tokenizer, tokenizer_hash
from flopwright.spec.model import ModelSpec

_TEMPORARY: Final = ".tmp-"


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows `offset .. offset + len(tensor)` of a tensor of shape `full_shape`.

    Experts of one rank and flat ZeRO partitions are such slices.
    """

    tensor: Tensor
    full_shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a checkpoint records beside tensors.

    Attributes:
        step: optimizer steps done.
        seed: of the run.
        tokenizer_file: the run's tokenizer.json; copied into the checkpoint.
        plan: the parallel plan's data.
    """

    step: int
    seed: int
    model: ModelSpec
    tokenizer_file: Path
    plan: dict[str, Any] | None = None


def save(
    folder: Path,
    tensors: Mapping[str, Tensor | TensorSlice],
    run: RunState,
    state: dict[str, Any] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] = lambda: None,
    keep: int = 2,
) -> Path:
    """Writes one step's checkpoint and returns its folder, `folder/step-NNNNNNNN`.

    Every rank calls it with its own tensors on a file system they share. The step folder
    appears by one rename after every file is on disk; a kill at any moment leaves the
    earlier checkpoints as they were.

    Args:
        folder: the run's checkpoint folder.
        tensors: by name; a part of a tensor is a `TensorSlice`.
        run: what all ranks agree on.
        state: plain data of this rank that JSON can hold, handed back by `load`.
        rank: this process, of `world_size`.
        world_size: processes that save together.
        barrier: waits for all of them.
        keep: steps that stay; older ones are removed after the new one stands.
    """
    temporary = folder / f"{_TEMPORARY}{step_folder(run.step)}"
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob(f"{_TEMPORARY}*"):
            shutil.rmtree(left_over)
        temporary.mkdir()
    barrier()
    _write_shard(temporary, rank, tensors, state or {})
    barrier()
    if rank == 0:
        _commit(temporary, folder / step_folder(run.step), run, world_size)
        for step in steps_of(folder)[: -max(1, keep)]:
            shutil.rmtree(folder / step_folder(step))
    barrier()
    return folder / step_folder(run.step)


def _write_shard(
    temporary: Path,
    rank: int,
    tensors: Mapping[str, Tensor | TensorSlice],
    state: dict[str, Any],
) -> None:
    plain: dict[str, Tensor] = {}
    entries: dict[str, TensorEntry] = {}
    for name, value in tensors.items():
        part = value if isinstance(value, TensorSlice) else TensorSlice(value, value.shape, 0)
        # A copy of its own: safetensors refuses tensors that share storage (tied weights).
        plain[name] = part.tensor.detach().to("cpu", copy=True).contiguous()
        entries[name] = TensorEntry(
            dtype=str(plain[name].dtype).removeprefix("torch."),
            shape=tuple(plain[name].shape),
            full_shape=tuple(part.full_shape),
            offset=part.offset,
            crc32=tensor_crc32(plain[name]),
        )
    path = temporary / f"rank-{rank:05d}.safetensors"
    save_file(plain, path)
    _sync(path)
    entry = ShardEntry(
        file=path.name,
        sha256=file_sha256(path),
        size=path.stat().st_size,
        tensors=entries,
        state=state,
    )
    record = _record_path(temporary, rank)
    record.write_text(entry.model_dump_json(), encoding="utf-8")


def tensor_crc32(tensor: Tensor) -> int:
    """Returns the crc32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _record_path(temporary: Path, rank: int) -> Path:
    return temporary / f"rank-{rank:05d}.json"


def _commit(temporary: Path, target: Path, run: RunState, world_size: int) -> None:
    """Writes the manifest over all ranks' records and gives the folder its name."""
    shards = []
    for rank in range(world_size):
        record = _record_path(temporary, rank)
        if not record.is_file():
            raise InputError(
                Violation(
                    file=str(record),
                    rule="this rank's part is not visible to rank 0",
                    nearest_fix="write checkpoints to a file system that all nodes share",
                )
            )
        shards.append(ShardEntry.model_validate_json(record.read_bytes()))
        record.unlink()
    shutil.copyfile(run.tokenizer_file, temporary / TOKENIZER_FILE)
    manifest = Manifest(
        tool_version=flopwright.__version__,
        step=run.step,
        seed=run.seed,
        model=run.model,
        model_hash=run.model.content_hash(),
        tokenizer_hash=tokenizer_hash(load_tokenizer(run.tokenizer_file)),
        tokenizer_sha256=file_sha256(temporary / TOKENIZER_FILE),
        plan=run.plan,
        world_size=world_size,
        shards=tuple(shards),
    )
    (temporary / MANIFEST_FILE).write_text(manifest_text(manifest), encoding="utf-8")
    for path in temporary.iterdir():
        _sync(path)
    _sync(temporary)
    replaced = target.with_name(f"{_TEMPORARY}replaced-{target.name}")
    if target.exists():  # the same step saved again
        target.rename(replaced)
    temporary.rename(target)
    _sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
