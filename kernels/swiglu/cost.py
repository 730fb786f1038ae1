"""What SwiGLU costs: bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
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
