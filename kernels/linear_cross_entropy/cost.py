"""What head and cross-entropy in one cost: three products, the first of them twice."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES

PARTS = 16  # of the vocabulary, whose logits' gradient stands in memory one at a time


def linear_cross_entropy(
    cost: CostBuilder, name: str, *, tokens: ArrayLike, hidden: ArrayLike, vocab: ArrayLike,
    dtype: str, sides: int = 1, kernel: str = "triton",
) -> None:  # fmt: skip
    """Adds forward (logits read nowhere, written nowhere) and backward (logits made again).

    Args:
        kernel: "library" for liger-kernel's, which writes a part of the logits and reads it
            for the loss, then multiplies with their gradient, a part of the tokens at a time.
        sides: 2 where the distribution of a second head is made too (`lk_loss`): its logits
            cost two more products forward, one more backward, and it gets no gradient.
    """
    t, h, v = (np.asarray(x, float) for x in (tokens, hidden, vocab))
    width, product = DTYPE_BYTES[dtype], 2 * t * h * v
    x, w, d = t * h * width, v * h * width, t * v * width
    one, seen = np.ones_like(t), 2 * d if kernel == "library" else 0 * d

    def row(phase: Phase, times: float, read: Array, written: Array) -> None:
        cost.op(
            name, OpKind.GEMM, phase, dtype=dtype, flops=times * product, m=t, k=h, n=v,
            read_bytes=read, written_bytes=written, kernel="fused",
        )  # fmt: skip

    # Of a part of the logits' gradient: written, and read by both products.
    row(Phase.FORWARD, 1 if sides == 1 else 4, (1 if sides == 1 else 4) * (x + w) + seen / 2,
        8 * t * one + seen / 2)  # fmt: skip
    # Both gradients are made together: none waits for a later phase.
    row(Phase.BACKWARD_INPUT, sides + 2, (sides + 2) * x + (sides + 1) * w + 2 * d + seen,
        x + w + d + seen / 2)  # fmt: skip


def scratch_bytes(tokens: ArrayLike, vocab: ArrayLike, dtype: str) -> Array:
    """Returns the bytes of the part of the logits' gradient that stands at one time."""
    whole = np.asarray(vocab, float)
    v = np.minimum(whole, np.ceil(whole / (PARTS * 128)) * 128)
    return np.asarray(np.asarray(tokens, float) * v * DTYPE_BYTES[dtype])
