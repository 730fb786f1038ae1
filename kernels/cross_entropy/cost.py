"""What cross-entropy costs: bytes over the logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def cross_entropy(
    cost: CostBuilder, name: str, *, tokens: ArrayLike, vocab: ArrayLike, dtype: str
) -> None:
    """Adds forward (read the logits) and backward (read them, write their gradient)."""
    n = np.asarray(tokens, float) * np.asarray(vocab, float)
    nbytes = n * DTYPE_BYTES[dtype]
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=nbytes, written_bytes=0.0
    )
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=n, read_bytes=nbytes,
        written_bytes=nbytes,
    )  # fmt: skip
