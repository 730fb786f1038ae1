"""What RMSNorm costs: bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import Array, CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def wide_bytes(dtype: str) -> int:
    """Returns the width of row statistics and router scores: fp32, or fp64 for fp64."""
    return max(DTYPE_BYTES[dtype], DTYPE_BYTES["fp32"])


def rstd_bytes(rows: ArrayLike, dtype: str) -> Array:
    """Returns the bytes of the reciprocal root mean squares that the op saves."""
    return np.asarray(rows, float) * wide_bytes(dtype)


def rms_norm(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds forward (read x, write y) and backward (read x and dy, write dx)."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    x, rstd = n * DTYPE_BYTES[dtype], rstd_bytes(rows, dtype)
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=x,
        written_bytes=x + rstd, tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=n, read_bytes=2 * x + rstd,
        written_bytes=x,
    )  # fmt: skip


def add_rms_norm(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds forward (read both terms, write sum and norm) and backward.

    Backward reads the sum and the gradients of both results and writes one for both terms.
    """
    n = np.asarray(rows, float) * np.asarray(width, float)
    x, rstd = n * DTYPE_BYTES[dtype], rstd_bytes(rows, dtype)
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=2 * x,
        written_bytes=2 * x + rstd, tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=n, read_bytes=3 * x + rstd,
        written_bytes=x,
    )  # fmt: skip
