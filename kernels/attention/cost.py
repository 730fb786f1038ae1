"""What causal attention costs. Only pairs that the mask lets through are executed."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.ops import CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def attention(
    cost: CostBuilder,
    name: str,
    *,
    sequences: ArrayLike,
    seq_len: ArrayLike,
    heads: ArrayLike,
    kv_heads: ArrayLike,
    qk_width: int,
    v_width: int,
    dtype: str,
    cp: ArrayLike = 1.0,
    window: int | None = None,
) -> None:
    """Adds the forward and the backward row.

    pairs = sequences * heads * seen / cp, where seen = w (w + 1) / 2 + (seq_len - w) w and w
    is the smaller of window and seq_len. Forward: 2 * pairs * (qk + v). Backward computes
    the scores again: 2 * pairs * (3 * qk + 2 * v).
    """
    b, s, h, g, c = (np.asarray(x, float) for x in (sequences, seq_len, heads, kv_heads, cp))
    width = DTYPE_BYTES[dtype]
    w = s if window is None else np.minimum(s, window)
    pairs = b * h * (w * (w + 1) / 2 + (s - w) * w) / c
    q, kv = b * s / c * h * qk_width * width, b * s * g * (qk_width + v_width) * width
    out = b * s / c * h * v_width * width
    lse = b * s / c * h * wide_bytes(dtype)
    rows = (
        (Phase.FORWARD, qk_width + v_width, q + kv, out + lse),
        (Phase.BACKWARD_INPUT, 3 * qk_width + 2 * v_width, q + kv + 2 * out + lse, q + kv),
    )
    for phase, widths, read, written in rows:
        cost.op(
            name, OpKind.ATTENTION, phase, dtype=dtype, flops=2 * pairs * widths, m=s / c, n=s,
            k=qk_width, batch=b * h, read_bytes=read, written_bytes=written,
        )  # fmt: skip
