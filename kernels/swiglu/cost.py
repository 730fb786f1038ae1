"""What SwiGLU and SiTU-GLU cost: the same bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.fp8_quantize.cost import scale_bytes
from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import Array, CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def swiglu(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds forward (read gate and up, write y) and backward (read them and dy, write two)."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    y = n * DTYPE_BYTES[dtype]
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=2 * y, written_bytes=y,
        tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=2 * n, read_bytes=3 * y,
        written_bytes=2 * y,
    )  # fmt: skip


def gated_fp8(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds the pass that also writes its inputs' codes and scales, and the one that reads them.

    It keeps `kept_fp8_bytes`.
    """
    n = np.asarray(rows, float) * np.asarray(width, float)
    y, kept = n * DTYPE_BYTES[dtype], kept_fp8_bytes(rows, width)
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=2 * y,
        written_bytes=y + kept, tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=2 * n, read_bytes=y + kept,
        written_bytes=2 * y,
    )  # fmt: skip


def kept_fp8_bytes(rows: ArrayLike, width: ArrayLike) -> Array:
    """Returns the bytes of codes and scales of both inputs."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    return np.asarray(2 * (n + scale_bytes(rows, width)))
