"""What the histogram of quantile balancing costs: bytes, once a step."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.ops import CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def balance_histogram(
    cost: CostBuilder, name: str, *, tokens: ArrayLike, num_experts: int, bins: int, dtype: str
) -> None:
    """Adds the pass over the scores; the counts are what ranks sum."""
    t = np.asarray(tokens, float)
    cost.op(
        name, OpKind.MEMORY_BOUND, Phase.FORWARD, dtype=dtype, m=t * num_experts,
        read_bytes=t * (num_experts + 1) * wide_bytes(dtype),
        written_bytes=num_experts * bins * DTYPE_BYTES["int32"],
    )  # fmt: skip
