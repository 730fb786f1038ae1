"""What LayerNorm costs: bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.ops import Array, CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES

_STATISTICS = 2  # mean and reciprocal deviation


def statistics_bytes(rows: ArrayLike, dtype: str) -> Array:
    """Returns the bytes of the row statistics that the op saves."""
    return np.asarray(rows, float) * _STATISTICS * wide_bytes(dtype)


def layer_norm(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds forward (read x, write y) and backward (read x and dy, write dx)."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    x, kept = n * DTYPE_BYTES[dtype], statistics_bytes(rows, dtype)
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=x,
        written_bytes=x + kept, tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=n, read_bytes=2 * x + kept,
        written_bytes=x,
    )  # fmt: skip
