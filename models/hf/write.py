"""Writing a released-layout checkpoint: tensors stream in, shards stream out."""

from __future__ import annotations

import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.models.formats.codecs import coded
from flopwright.models.formats.layout import Layout, layout_for
from flopwright.models.formats.mx import ScaleRule
from flopwright.models.formats.plan import BF16, projections, target_layout
from flopwright.models.formats.quantization_config import quantization_config, with_format
from flopwright.models.hf.arrange import from_rows
from flopwright.models.hf.config import CONFIG_FILE
from flopwright.models.hf.config_out import hf_config
from flopwright.models.hf.files import CRC_KEY, INDEX_FILE
from flopwright.models.hf.names import Stored, stored_tensors
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import ParamTensor, parameters

DEFAULT_SHARD_BYTES: Final = 5_000_000_000


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows from `first` on of a tensor: what one rank holds of stacked experts."""

    tensor: Tensor
    first: int


@dataclass(slots=True)
class _Pending:
    """A stored tensor of which parts have arrived."""

    stored: Stored
    parts: dict[int, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _Shards:
    """Shards written so far, and the tensors of the next one."""

    folder: Path
    max_bytes: int
    held: dict[str, Tensor] = field(default_factory=dict)
    held_bytes: int = 0
    names: list[list[str]] = field(default_factory=list)
    total_bytes: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Holds a tensor, writing what is held first if both exceed a shard."""
        if self.held and self.held_bytes + tensor.nbytes > self.max_bytes:
            self.flush()
        self.held[name] = tensor
        self.held_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def flush(self) -> None:
        """Writes what is held as the next shard."""
        if not self.held:
            return
        path = self.folder / f"shard-{len(self.names):05d}"
        sums = {name: tensor_crc32(t) for name, t in self.held.items()}
        save_file(self.held, path, {"format": "pt", CRC_KEY: json.dumps(sums)})
        _sync(path)
        self.names.append(list(self.held))
        self.held.clear()
        self.held_bytes = 0

    def finish(self) -> None:
        """Gives the shards their names and writes the index."""
        self.flush()
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self.names):
            final = f"model-{i + 1:05d}-of-{len(self.names):05d}.safetensors"
            (self.folder / f"shard-{i:05d}").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        _write_json(self.folder / INDEX_FILE, index)


def tensor_crc32(tensor: Tensor) -> int:
    """Returns the crc32 of a contiguous CPU tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)


def write_checkpoint(
    folder: Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor | TensorRows]],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    dtype: torch.dtype | None = None,
    release: str = BF16,
    rule: ScaleRule = "floor",
    beside: Iterable[Path] = (),
) -> None:
    """Writes a model as config.json, safetensors shards and their index.

    The folder appears by one rename once everything is on disk; on any error nothing is
    left. At most one shard and the tensor being handed in are in memory: hand tensors in
    from a generator. A tensor larger than a shard gets a shard of its own.

    Args:
        folder: must not exist yet, or be empty.
        tensors: by the names of `flopwright.spec.parameters`, each once, in any order; rows
            of stacked experts may come apart. A tied head is not written.
        max_shard_bytes: most bytes of tensors in one file.
        dtype: to cast weights to; the router's selection bias stays as it is.
        release: format of the matrices that such releases quantise; "bf16" leaves them plain.
        rule: how MXFP4's scales are chosen.
        beside: files to copy into the folder.

    Raises:
        InputError: the folder holds something; or a tensor is unknown, twice there, of a wrong
            shape or missing, or does not fit the release's format.
    """
    layout = target_layout(release, spec.family)
    said = None if layout is None else quantization_config(layout, _kept(layout, spec))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            Violation(
                file=str(folder),
                rule="there is something here already",
                nearest_fix="name a new folder",
            )
        )
    # What is written is the text model: a tower of images is trained and saved by others.
    config = hf_config(spec.model_copy(update={"vision": None}))
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".tmp-{folder.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        shards = _Shards(temporary, max_shard_bytes)
        dtypes = set()
        for name, tensor in _assembled(spec, tensors, dtype):
            for part_name, part in coded(layout, name, tensor, rule):
                shards.add(part_name, part)
                if part is tensor:
                    dtypes.add(tensor.dtype)
            del tensor, part
        shards.finish()
        # The narrowest: the selection bias is stored wider than the weights.
        stored = min(dtypes, key=lambda d: d.itemsize)
        _write_json(
            temporary / CONFIG_FILE,
            {
                **with_format(config, said),
                "torch_dtype": str(stored).removeprefix("torch."),
            },
        )
        for path in beside:
            shutil.copyfile(path, temporary / path.name)
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if folder.exists():
            folder.rmdir()
        temporary.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _kept(layout: Layout, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the projections in layers that the format leaves as they are."""
    return projections(
        (s.name, s.shape)
        for s in stored_tensors(spec)
        if layout_for(layout, s.name, s.shape) is None
    )


def _assembled(
    spec: ModelSpec,
    tensors: Iterable[tuple[str, Tensor | TensorRows]],
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields each stored tensor as soon as its parts have arrived."""
    known = {p.name: p for p in parameters(spec)}
    waiting: dict[str, list[tuple[_Pending, int]]] = {}
    for stored in stored_tensors(spec):
        pending = _Pending(stored)
        for i, part in enumerate(stored.parts):
            waiting.setdefault(part.name, []).append((pending, i))
    for name, value in tensors:
        rows = value if isinstance(value, TensorRows) else TensorRows(value, 0)
        p = _checked(known, name, rows)
        if p.tied:
            continue
        for pending, i in _covered(waiting, name, rows):
            pending.parts[i] = _cut(pending.stored, i, rows, dtype if p.trainable else None)
            if len(pending.parts) == len(pending.stored.parts):
                yield pending.stored.name, _stacked(pending)
        del rows, value
    missing = sorted(name for name, left in waiting.items() if left)
    if missing:
        raise InputError(
            [
                Violation(field=name, rule="the tensor was not handed in, or only in part")
                for name in missing[:20]
            ]
        )


def _checked(known: dict[str, ParamTensor], name: str, rows: TensorRows) -> ParamTensor:
    p = known.get(name)
    if p is None:
        raise InputError(
            Violation(
                field=name, rule="no tensor of this model", nearest_fix=did_you_mean(name, known)
            )
        )
    shape, last = tuple(rows.tensor.shape), rows.first + (rows.tensor.shape or (0,))[0]
    apart = p.role == "expert"
    fits = shape[1:] == p.shape[1:] and 0 <= rows.first < last <= p.shape[0]
    if not fits or (not apart and shape != p.shape):
        raise InputError(
            Violation(
                field=name,
                value=f"{list(shape)} from row {rows.first}",
                rule="wrong shape",
                limit=str(list(p.shape)),
            )
        )
    return p


def _covered(
    waiting: dict[str, list[tuple[_Pending, int]]], name: str, rows: TensorRows
) -> list[tuple[_Pending, int]]:
    """Returns the parts that these rows hold, and takes them from those waited for."""
    last = rows.first + rows.tensor.shape[0]

    def inside(entry: tuple[_Pending, int]) -> bool:
        expert = entry[0].stored.parts[entry[1]].expert
        return expert is None or rows.first <= expert < last

    found = [entry for entry in waiting[name] if inside(entry)]
    waiting[name] = [entry for entry in waiting[name] if not inside(entry)]
    if not found:
        raise InputError(Violation(field=name, rule="the tensor was handed in twice"))
    return found


def _cut(stored: Stored, i: int, rows: TensorRows, dtype: torch.dtype | None) -> Tensor:
    """Returns part i as a CPU tensor that keeps nothing larger than itself alive."""
    part, tensor = stored.parts[i], rows.tensor.detach()
    if part.expert is not None:
        tensor = tensor[part.expert - rows.first]
    tensor = tensor[part.first : part.last].to("cpu", dtype).contiguous()
    if tensor.untyped_storage().nbytes() != tensor.nbytes:
        tensor = tensor.clone()
    return tensor


def _stacked(pending: _Pending) -> Tensor:
    parts = [pending.parts.pop(i) for i in range(len(pending.stored.parts))]
    return from_rows(pending.stored, parts[0] if len(parts) == 1 else torch.cat(parts))


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
