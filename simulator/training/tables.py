"""Putting operator tables together, and changing some of their rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from flopwright.ops import CostBuilder, OpTable

_NAMES = ("name", "tag", "kernel", "dtype")
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
