"""The header of a safetensors file, checked against the file's size. No torch.

Format: 8 bytes little-endian length n, n bytes of JSON (name -> dtype, shape, [begin, end) in
the data), then the data, without gaps (github.com/huggingface/safetensors, README).
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation

MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
DTYPE_BITS: Final = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip
WEIGHT_DTYPES: Final = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header says: dtype by the format's name, and its end in the data."""

    dtype: str
    shape: tuple[int, ...]
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True, slots=True)
class Header:
    """Tensors by name, and the free text beside them; the data begin at byte `start`."""

    tensors: dict[str, StoredTensor]
    metadata: dict[str, str]
    start: int


def _bad(path: Path, rule: str, tensor: str = "", value: str = "", limit: str = "") -> InputError:
    return InputError(
        Violation(
            file=str(path),
            field=tensor,
            value=value,
            rule=rule,
            limit=limit,
            nearest_fix="fetch or write the file again",
        )
    )


def read_header(path: Path) -> Header:
    """Returns a file's header.

    Raises:
        InputError: unreadable, no safetensors file, or a size that does not fit the header;
            the file is named, and the first tensor that is cut off.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
                raise _bad(path, "not a whole safetensors file: its header is cut off or broken")
            text = stream.read(length)
    except OSError as error:
        raise InputError(
            Violation(file=str(path), rule=f"cannot read the file: {error.strerror}")
        ) from error
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "not a safetensors file: its header is no JSON") from error
    if not isinstance(raw, dict):
        raise _bad(path, "not a safetensors file: its header is no JSON object")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _bad(path, "its metadata is not text")
    return Header(_tensors(path, raw, size - 8 - length), metadata, 8 + length)


def _tensors(path: Path, raw: dict[str, Any], data_bytes: int) -> dict[str, StoredTensor]:
    spans: dict[str, tuple[int, int]] = {}
    out = {}
    for name, entry in raw.items():
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (TypeError, KeyError, ValueError) as error:
            raise _bad(path, "its header entry is broken", name) from error
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
        if not isinstance(dtype, str) or dtype not in DTYPE_BITS or not whole:
            raise _bad(path, "its header entry is broken", name, f"{dtype} {shape}")
        if (end - begin) * 8 != math.prod(shape) * DTYPE_BITS[dtype]:
            raise _bad(path, "its bytes do not fit its shape", name, f"{dtype} {list(shape)}")
        spans[name], out[name] = (begin, end), StoredTensor(dtype, shape, end)
    ordered = sorted(spans, key=spans.__getitem__)
    for name in ordered:
        if spans[name][1] > data_bytes:
            cut = f"{data_bytes} of {spans[ordered[-1]][1]} data bytes"
            raise _bad(path, "the file is truncated inside this tensor", name, cut)
    for before, name in itertools.pairwise(ordered):
        if spans[name][0] != spans[before][1]:
            raise _bad(path, f"does not begin where {before} ends", name)
    first, last = (spans[ordered[0]][0], spans[ordered[-1]][1]) if ordered else (0, 0)
    if first != 0 or last != data_bytes:
        raise _bad(path, "holds bytes that belong to no tensor", value=f"{data_bytes - last}")
    return out
