"""What the short convolution costs: bytes. Its taps are few enough not to count."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def short_conv(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds forward (read x, write y) and backward (read x and dy, write dx)."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    x = n * DTYPE_BYTES[dtype]
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=x, written_bytes=x, tag=tag
    )
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=n, read_bytes=2 * x,
        written_bytes=x,
    )  # fmt: skip
