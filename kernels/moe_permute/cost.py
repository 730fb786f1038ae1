"""What sorting rows by expert and back costs: bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def permute(
    cost: CostBuilder, name: str, *, tokens: ArrayLike, top_k: int, width: int, dtype: str
) -> None:
    """Adds the gather to expert order, and the sum over a token's rows on the way back."""
    t = np.asarray(tokens, float)
    x, rows = t * width * DTYPE_BYTES[dtype], t * top_k * width * DTYPE_BYTES[dtype]
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=t * top_k * width, read_bytes=rows,
        written_bytes=rows,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=t * width, read_bytes=rows,
        written_bytes=x,
    )  # fmt: skip


def unpermute(
    cost: CostBuilder, name: str, *, tokens: ArrayLike, top_k: int, width: int, dtype: str
) -> None:
    """Adds the weighted sum over a token's rows, and the gradients of rows and weights."""
    t = np.asarray(tokens, float)
    x, rows = t * width * DTYPE_BYTES[dtype], t * top_k * width * DTYPE_BYTES[dtype]
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=t * width, read_bytes=rows,
        written_bytes=x,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=t * top_k * width,
        read_bytes=2 * rows, written_bytes=rows,
    )  # fmt: skip
