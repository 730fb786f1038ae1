"""Rows of operators whose time is the bytes they move. Their FLOPs are not counted (0)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import CostBuilder, OpKind, Phase


def memory_bound(
    cost: CostBuilder,
    name: str,
    phase: Phase,
    *,
    dtype: str,
    elements: ArrayLike,
    read_bytes: ArrayLike,
    written_bytes: ArrayLike,
    tag: str = "",
) -> None:
    """Adds a row; its shape is m = the elements of its output (the argument of its curve)."""
    cost.op(
        name,
        OpKind.MEMORY_BOUND,
        phase,
        dtype=dtype,
        m=np.asarray(elements, float),
        read_bytes=read_bytes,
        written_bytes=written_bytes,
        tag=tag,
    )
