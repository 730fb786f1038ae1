"""A checkpoint folder becomes one in another release format, piece by piece.

Memory: a piece is at most `PIECE_ELEMENTS` numbers (or one block row of 128 rows, or, in
gpt-oss's layout, one expert's matrix, where that is more), read, widened to fp32, and written;
about `BYTES_AN_ELEMENT` bytes a number stand at once. Neither the size of the model nor that of
its tensors or shards matters.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from flopwright.errors import InputError
from flopwright.models.formats.codecs import TORCH_DTYPES, check_finite, decode, encode
from flopwright.models.formats.job import Job
from flopwright.models.formats.mx import ScaleRule
from flopwright.models.formats.plan import Move, ShardPlan
from flopwright.models.formats.shard_writer import ShardWriter
from flopwright.models.formats.stored import Span
from flopwright.models.hf.config import CONFIG_FILE
from flopwright.models.hf.files import INDEX_FILE, problem

PIECE_ELEMENTS: Final = 2**22
BYTES_AN_ELEMENT: Final = 32
_COPIED_BYTES: Final = 2**23

Progress = Callable[[int], object]


@dataclass(slots=True)
class _Reader:
    """Reads a stored tensor from its beginning on; its sum is checked at the end."""

    span: Span
    file: BufferedReader
    done: int = 0
    crc32: int = 0

    def read(self, nbytes: int) -> bytearray:
        """Returns the next bytes.

        Raises:
            InputError: the file ends, or the sum is not the one recorded.
        """
        span, data = self.span, bytearray(nbytes)
        self.file.seek(span.begin + self.done)
        if self.file.readinto(data) != nbytes:
            raise InputError(problem(span.file, span.name, "the file is truncated"))
        self.done += nbytes
        if span.crc32 is not None:
            self.crc32 = zlib.crc32(data, self.crc32)
            if self.done == span.nbytes and self.crc32 != span.crc32:
                rule = "its bytes are not those that were written"
                raise InputError(problem(span.file, span.name, rule))
        return data

    def rows(self, count: int, inner: int = 1) -> Tensor:
        """Returns the next rows: what all dimensions but the last `inner` count."""
        span = self.span
        dtype, row = TORCH_DTYPES[span.dtype], span.shape[-inner:]
        data = self.read(count * math.prod(row) * dtype.itemsize)
        return torch.frombuffer(data, dtype=dtype).view(count, *row)


def run(job: Job, *, rule: ScaleRule = "floor", progress: Progress = lambda _: None) -> None:
    """Writes the folder that a job plans: whole, by one rename at the end, or nothing.

    Args:
        rule: how MXFP4's scales are chosen.
        progress: called with the bytes written since the last call.

    Raises:
        InputError: a tensor that cannot be read, or holds numbers that are not finite.
    """
    job.out.parent.mkdir(parents=True, exist_ok=True)
    temporary = job.out.with_name(f".tmp-{job.out.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        for shard in job.shards:
            _write_shard(temporary, shard, rule, progress)
        _write_rest(job, temporary)
        if job.out.exists():
            job.out.rmdir()
        temporary.rename(job.out)
        _sync(job.out.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_rest(job: Job, temporary: Path) -> None:
    names = {out.name: shard.name for shard in job.shards for out in shard.outputs}
    index = {"metadata": {"total_size": job.nbytes}, "weight_map": dict(sorted(names.items()))}
    for name, data in ((INDEX_FILE, index), (CONFIG_FILE, job.config)):
        text = json.dumps(data, indent=2) + "\n"
        (temporary / name).write_text(text, encoding="utf-8")
    for path in job.beside:
        shutil.copyfile(path, temporary / path.name)
    for path in (*temporary.iterdir(), temporary):
        _sync(path)


def _write_shard(folder: Path, shard: ShardPlan, rule: ScaleRule, progress: Progress) -> None:
    with ShardWriter(folder / shard.name, shard.outputs) as writer:
        for move in shard.moves:
            for name, data in _pieces(move, rule):
                writer.write(name, data)
                progress(len(data))


def _pieces(move: Move, rule: ScaleRule) -> Iterator[tuple[str, bytearray | memoryview]]:
    """Yields the bytes of a weight's outputs, each output's in order."""
    readers: dict[str, _Reader] = {}
    try:
        for ending, span in move.weight.parts.items():
            readers[ending] = _Reader(span, span.file.open("rb"))
        if move.copied:
            for ending, reader in readers.items():
                yield from _copies(move.outputs[ending].name, reader)
            return
        described = False
        for matrix in _matrices(move, readers):
            for ending, tensor in _narrowed(move, matrix, rule).items():
                whole = move.target is not None and _describes(move, ending)
                if whole and described:
                    continue
                described = described or whole
                yield move.outputs[ending].name, _bytes_of(tensor)
    except OSError as error:
        path = Path(error.filename) if error.filename else move.weight.file
        rule_ = f"cannot be read: {error.strerror}"
        raise InputError(problem(path, move.weight.name, rule_)) from error
    finally:
        for reader in readers.values():
            reader.file.close()


def _describes(move: Move, ending: str) -> bool:
    assert move.target is not None
    return any(p.ending == ending and p.rows == 0 for p in move.target.parts)


def _copies(name: str, reader: _Reader) -> Iterator[tuple[str, bytearray]]:
    left = reader.span.nbytes
    while left:
        data = reader.read(min(left, _COPIED_BYTES))
        left -= len(data)
        yield name, data


def _narrowed(move: Move, matrix: Tensor, rule: ScaleRule) -> dict[str, Tensor]:
    if move.target is None:
        return {"": matrix.to(TORCH_DTYPES[move.outputs[""].dtype])}
    parts = encode(move.target, matrix, rule)
    for part in move.target.parts:
        if part.rows == 0:  # says the shape of the whole weight, not of these rows
            parts[part.ending] = torch.tensor(move.matrix_shape)
    return parts


def _matrices(move: Move, readers: dict[str, _Reader]) -> Iterator[Tensor]:
    """Yields a weight's rows in fp32 (or the dtype it has), a piece at a time."""
    weight = move.weight
    shape = (1, 1, *weight.shape)
    stack, rows = (math.prod(shape[:-2]), shape[-2]) if move.turned else (1, math.prod(shape[:-1]))
    for _ in range(stack):
        for count in _counts(move, rows, shape[-1]):
            matrix = _rows(move, readers, count)
            check_finite(matrix, weight.name, str(weight.file))
            yield matrix.t().contiguous() if move.turned else matrix


def _counts(move: Move, rows: int, columns: int) -> Iterator[int]:
    """Yields how many rows a piece has: whole blocks of both layouts."""
    layouts = [x for x in (move.weight.layout, move.target) if x is not None]
    block = max((x.row_block for x in layouts), default=1)
    most = max(block, PIECE_ELEMENTS // max(1, columns) // block * block)
    while rows:
        count = rows if move.turned else min(rows, most)
        yield count
        rows -= count


def _rows(move: Move, readers: dict[str, _Reader], count: int) -> Tensor:
    layout = move.weight.layout
    if layout is None:
        return readers[""].rows(count)
    parts = {}
    for part in layout.parts:
        reader = readers[part.ending]
        if part.rows:
            parts[part.ending] = reader.rows(-(-count // part.rows), part.inner)
        elif reader.done == 0:
            said = reader.rows(1).flatten().tolist()
            if said != list(move.weight.shape):
                rule = "says another shape than its weight has"
                span, limit = reader.span, str(list(move.weight.shape))
                raise InputError(problem(span.file, span.name, rule, str(said), limit))
    return decode(layout, parts)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _sync(path: Path) -> None:
    """Waits until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
