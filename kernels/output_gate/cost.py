"""What output gates cost: bytes, with and without the norm in front."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def output_gate(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds forward (read x and gate, write y) and backward (read them and dy, write two)."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    x = n * DTYPE_BYTES[dtype]
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=2 * x, written_bytes=x,
        tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=2 * n, read_bytes=3 * x,
        written_bytes=2 * x,
    )  # fmt: skip
