"""What choosing experts costs: bytes over the logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def route(
    cost: CostBuilder, name: str, *, tokens: ArrayLike, num_experts: int, top_k: int, dtype: str
) -> None:
    """Adds forward (read logits, write choices, weights) and backward (write their gradient)."""
    t, wide = np.asarray(tokens, float), wide_bytes(dtype)
    logits, chosen = t * num_experts * wide, t * top_k * (DTYPE_BYTES["int64"] + wide)
    elements = t * num_experts
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=elements, read_bytes=2 * logits,
        written_bytes=logits + chosen,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=elements, read_bytes=chosen,
        written_bytes=logits,
    )  # fmt: skip
