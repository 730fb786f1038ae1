"""A safetensors file written piece by piece: its header is known before its data."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flopwright.models.formats.plan import Output
from flopwright.models.hf.files import CRC_KEY

_LARGEST_CRC32: Final = 0xFFFFFFFF


class ShardWriter:
    """Writes tensors in any order, each from its beginning on, in pieces of any size.

    The header has room for every tensor's crc32 and is written again at the end.
    """

    def __init__(self, path: Path, outputs: Sequence[Output]) -> None:
        self._path, self._outputs = path, outputs
        self._sums = {out.name: 0 for out in outputs}
        self._room = len(self._header(dict.fromkeys(self._sums, _LARGEST_CRC32)))
        self._room += -self._room % 8
        self._next: dict[str, int] = {}
        self._ends: dict[str, int] = {}
        place = 8 + self._room
        for out in outputs:
            self._next[out.name], self._ends[out.name] = place, place + out.nbytes
            place += out.nbytes
        self._file = path.open("wb")

    def _header(self, sums: dict[str, int]) -> bytes:
        entries: dict[str, Any] = {
            "__metadata__": {"format": "pt", CRC_KEY: json.dumps(sums, separators=(",", ":"))}
        }
        begin = 0
        for out in self._outputs:
            end = begin + out.nbytes
            entries[out.name] = {
                "dtype": out.dtype, "shape": list(out.shape), "data_offsets": [begin, end],
            }  # fmt: skip
            begin = end
        return json.dumps(entries, separators=(",", ":")).encode()

    def write(self, name: str, data: bytearray | memoryview) -> None:
        """Appends bytes to a tensor."""
        assert self._next[name] + len(data) <= self._ends[name], name
        self._file.seek(self._next[name])
        self._file.write(data)
        self._next[name] += len(data)
        self._sums[name] = zlib.crc32(data, self._sums[name])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            assert self._next == self._ends
            self._file.seek(0)
            self._file.write(self._room.to_bytes(8, "little"))
            self._file.write(self._header(self._sums).ljust(self._room))
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
