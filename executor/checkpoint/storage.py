"""Writing through `torch.distributed.checkpoint`: safetensors, and JSON beside them.

torch's own storage pickles its metadata, and its planners exchange pickled plans. Here every
rank plans for itself (`no_dist`): it writes the boxes that are its own into one safetensors
file and their list as JSON; whoever reads (storage_read.py) takes the boxes that its own overlap.
"""

from __future__ import annotations

import json
import os
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from flopwright.executor.checkpoint.boxes import TensorSlice
from flopwright.executor.checkpoint.manifest import (
    FileEntry,
    Piece,
    TensorEntry,
    file_sha256,
)

# Tensors by name, as the boxes of them that a rank holds.
Slices = Mapping[str, Sequence[TensorSlice]]

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or unini")


def write_slices(path: Path, slices: Slices, scalars: Mapping[str, float]) -> None:
    """Writes one rank's file and, beside it under the same stem, its record as JSON."""
    writer = _Writer(path, dict(scalars))
    try:
        dcp_save(dict(slices), storage_writer=writer, planner=_SavePlanner(), no_dist=True)
    except CheckpointException as error:
        raise reason_of(error) from error


def reason_of(error: CheckpointException) -> BaseException:
    """Returns what torch has wrapped into an exception that `except Exception` passes by."""
    return next((first for first, _ in error.failures.values()), error)


def record_path(path: Path) -> Path:
    """Returns where the record of a rank's file stands until the manifest has it."""
    return path.with_suffix(".json")


def tensor_crc32(tensor: Tensor) -> int:
    """Returns the crc32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def chunk_of(box: TensorSlice) -> ChunkStorageMetadata:
    """Returns where a box stands, in torch's words."""
    return ChunkStorageMetadata(torch.Size(box.offsets), box.tensor.shape)


class _SavePlanner(SavePlanner):
    """Writes every box that it is given."""

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        self._slices: dict[str, list[TensorSlice]] = state_dict

    def create_local_plan(self) -> SavePlan:
        return SavePlan(
            [
                WriteItem(
                    index=MetadataIndex(name, box.offsets, i),
                    type=WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        chunk=chunk_of(box),
                        properties=TensorProperties(dtype=box.tensor.dtype),
                        size=torch.Size(box.full_shape),
                    ),
                )
                for name, boxes in self._slices.items()
                for i, box in enumerate(boxes)
            ]
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        index = write_item.index
        assert index.index is not None
        tensor = self._slices[index.fqn][index.index].tensor.detach()
        # A copy of its own: safetensors refuses tensors that share storage (tied weights).
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


class _Writer(StorageWriter):
    """One rank's file and its record."""

    def __init__(self, path: Path, scalars: dict[str, float]) -> None:
        self._path, self._scalars = path, scalars

    def reset(self, checkpoint_id: Any = None) -> None:
        """Has nothing to reset."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Has nothing to set up: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        pieces: dict[str, Piece] = {}
        entries: dict[str, TensorEntry] = {}
        for item in plan.items:
            data, name = item.tensor_data, item.index.fqn
            tensor = planner.resolve_data(item)
            assert data is not None
            assert isinstance(tensor, Tensor)
            entries[name] = TensorEntry(
                dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(data.size)
            )
            key = _key(name, data.chunk.offsets, data.size, tensor.shape)
            tensors[key] = tensor
            pieces[key] = Piece(
                tensor=name,
                offsets=tuple(data.chunk.offsets),
                shape=tuple(tensor.shape),
                crc32=tensor_crc32(tensor),
            )
        self._write(tensors, pieces, entries)
        written: Future[list[WriteResult]] = Future()
        written.set_result([])
        return written

    def _write(
        self,
        tensors: dict[str, Tensor],
        pieces: dict[str, Piece],
        entries: dict[str, TensorEntry],
    ) -> None:
        save_file(tensors, self._path)
        sync(self._path)
        entry = FileEntry(
            file=self._path.name,
            sha256=file_sha256(self._path),
            size=self._path.stat().st_size,
            pieces=pieces,
            tensors=entries,
            scalars=self._scalars,
        )
        # Rank 0 may look at any moment: it finds all of the record or nothing.
        record = record_path(self._path)
        unfinished = record.with_suffix(".part")
        unfinished.write_text(json.dumps(entry.model_dump(mode="json")), encoding="utf-8")
        unfinished.rename(record)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Leaves the manifest to whoever has all ranks' records."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)


def _key(name: str, offsets: Sequence[int], full: Sequence[int], shape: Sequence[int]) -> str:
    """Returns a piece's key in its file: the tensor's name, and where a part stands."""
    if tuple(full) == tuple(shape):
        return name
    return f"{name}@{','.join(map(str, offsets))}"
