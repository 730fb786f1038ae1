"""Storage and planners for `torch.distributed.checkpoint`: safetensors, and JSON beside them.

torch's own storage pickles its metadata, and its planners exchange pickled plans. Here every
rank plans for itself (`no_dist`): it writes the boxes that are its own into one safetensors
file and their list as JSON; whoever reads takes the boxes that its own overlap. torch's
resharding finds those overlaps.
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
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from flopwright.executor.checkpoint.boxes import TensorSlice
from flopwright.executor.checkpoint.manifest import (
    FileEntry,
    Manifest,
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
        raise _reason(error) from error


def read_slices(where: Path, manifest: Manifest, slices: Slices) -> None:
    """Fills the boxes' tensors in place from a step folder whose files are as recorded."""
    reader = _Reader(where, manifest)
    try:
        dcp_load(dict(slices), storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise _reason(error) from error


def _reason(error: CheckpointException) -> BaseException:
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


def _chunk(box: TensorSlice) -> ChunkStorageMetadata:
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
                        chunk=_chunk(box),
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


class _LoadPlanner(LoadPlanner):
    """Reads what overlaps the boxes it is given, into them."""

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        self._slices: dict[str, list[TensorSlice]] = state_dict
        self._stored = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for name, boxes in self._slices.items():
            stored = self._stored[name]
            assert isinstance(stored, TensorStorageMetadata)
            chunks = [_chunk(box) for box in boxes]
            items += create_read_items_for_chunk_list(name, stored, chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("nothing but tensors is stored")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert index.index is not None
        box = self._slices[index.fqn][index.index].tensor.detach()
        ends = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return box[tuple(slice(start, start + length) for start, length in ends)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Has nothing to commit: tensors are filled in place."""


class _Reader(StorageReader):
    """Boxes of the files that a manifest names."""

    def __init__(self, where: Path, manifest: Manifest) -> None:
        self._where, self._manifest = where, manifest
        self._places: dict[tuple[str, tuple[int, ...]], tuple[str, str]] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Has nothing to reset."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors = {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, entry.dtype)),
                size=torch.Size(entry.shape),
                chunks=[],
            )
            for name, entry in self._manifest.tensors().items()
        }
        for file in self._manifest.files:
            for key, piece in file.pieces.items():
                chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.shape))
                tensors[piece.tensor].chunks.append(chunk)
                self._places[piece.tensor, piece.offsets] = (file.file, key)
        return Metadata(dict(tensors))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Has nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[str, ReadItem]]] = {}
        for item in plan.items:
            assert item.type is LoadItemType.TENSOR
            index = item.storage_index
            file, key = self._places[index.fqn, tuple(index.offset or ())]
            by_file.setdefault(file, []).append((key, item))
        for file, items in by_file.items():
            with safe_open(self._where / file, framework="pt") as opened:
                for key, item in items:
                    self._read(opened, key, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, opened: Any, key: str, item: ReadItem, planner: LoadPlanner) -> None:
        target = planner.resolve_tensor(item)
        if not item.lengths:
            found = opened.get_tensor(key)
        else:
            ends = zip(item.storage_offsets, item.lengths, strict=True)
            found = opened.get_slice(key)[
                tuple(slice(start, start + length) for start, length in ends)
            ]
        assert found.shape == target.shape
        target.copy_(found)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return isinstance(checkpoint_id, str | Path)
