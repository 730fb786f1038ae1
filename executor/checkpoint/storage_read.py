"""Reading through `torch.distributed.checkpoint` what `storage.py` wrote.

torch's resharding finds which stored boxes overlap those that are wanted; nothing but JSON and
safetensors is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from flopwright.executor.checkpoint.boxes import TensorSlice
from flopwright.executor.checkpoint.manifest import Manifest
from flopwright.executor.checkpoint.storage import Slices, chunk_of, reason_of


def read_slices(where: Path, manifest: Manifest, slices: Slices) -> None:
    """Fills the boxes' tensors in place from a step folder whose files are as recorded."""
    reader = _Reader(where, manifest)
    try:
        dcp_load(dict(slices), storage_reader=reader, planner=_LoadPlanner(), no_dist=True)
    except CheckpointException as error:
        raise reason_of(error) from error


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
            chunks = [chunk_of(box) for box in boxes]
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
