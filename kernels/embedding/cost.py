"""What an embedding lookup costs: bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def embedding(
    cost: CostBuilder,
    name: str,
    *,
    tokens: ArrayLike,
    vocab: ArrayLike,
    width: int,
    dtype: str,
) -> None:
    """Adds the gather forward; backward fills a gradient of the whole table."""
    t, width_bytes = np.asarray(tokens, float), DTYPE_BYTES[dtype]
    rows, table = t * width * width_bytes, np.asarray(vocab, float) * width * width_bytes
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=t * width, read_bytes=rows,
        written_bytes=rows,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_WEIGHT, dtype=dtype, elements=t * width, read_bytes=rows,
        written_bytes=rows + table,
    )  # fmt: skip
