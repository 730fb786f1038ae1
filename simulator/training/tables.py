"""Putting operator tables together, and changing some of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from flopwright.ops import CostBuilder, OpTable, TensorLife

_NAMES = ("name", "tag", "kernel", "dtype")
_LIFE_NAMES, _LIFE_ARRAYS = ("name", "cls", "tag"), ("fp8", "bytes")
_ARRAYS = (
    "kind",
    "phase",
    "m",
    "k",
    "n",
    "batch",
    "count",
    "flops",
    "read_bytes",
    "written_bytes",
)


def with_rows(ops: OpTable, more: CostBuilder) -> OpTable:
    """Returns a table with the operator rows of a builder behind it."""
    extra = more.build(ops.num_candidates).ops
    if not len(extra):
        return ops
    columns: dict[str, Any] = {n: (*getattr(ops, n), *getattr(extra, n)) for n in _NAMES}
    columns |= {n: np.concatenate([getattr(ops, n), getattr(extra, n)]) for n in _ARRAYS}
    return OpTable(**columns)


def with_lives(lives: TensorLife, more: CostBuilder) -> TensorLife:
    """Returns a table with the kept tensors of a builder behind it."""
    extra = more.build(lives.bytes.shape[1]).lives
    if not len(extra):
        return lives
    columns: dict[str, Any] = {n: (*getattr(lives, n), *getattr(extra, n)) for n in _LIFE_NAMES}
    columns |= {n: np.concatenate([getattr(lives, n), getattr(extra, n)]) for n in _LIFE_ARRAYS}
    return TensorLife(**columns)
