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
    ulysses: ArrayLike = False,
    share: ArrayLike = 1.0,
) -> None:
    """Adds the forward and the backward row of a fused kernel.

    pairs = sequences * heads * share * seen / cp, seen = w (w + 1) / 2 + (seq_len - w) w and w
    is the smaller of window and seq_len. Forward: 2 * pairs * (qk + v). Backward computes
    the scores again: 2 * pairs * (3 * qk + 2 * v).

    Args:
        ulysses: where a context group has all tokens of heads / cp heads (booleans); else a
            rank has tokens / cp queries of all heads.
        share: of these pairs that documents packed in a row leave.
    """
    b, s, h, g, c = (np.asarray(x, float) for x in (sequences, seq_len, heads, kv_heads, cp))
    width = DTYPE_BYTES[dtype]
    w = s if window is None else np.minimum(s, window)
    pairs = b * h * (w * (w + 1) / 2 + (s - w) * w) / c * np.asarray(share, float)
    heads_cut = np.where(np.asarray(ulysses, bool), c, 1.0)
    q = b * s / c * h * qk_width * width
    kv = b * s * np.maximum(g / heads_cut, 1.0) * (qk_width + v_width) * width
    out = b * s / c * h * v_width * width
    lse = b * s / c * h * wide_bytes(dtype)
    rows = (
        (Phase.FORWARD, qk_width + v_width, q + kv, out + lse),
        (Phase.BACKWARD_INPUT, 3 * qk_width + 2 * v_width, q + kv + 2 * out + lse, q + kv),
    )
    for phase, widths, read, written in rows:
        cost.op(
            name, OpKind.ATTENTION, phase, dtype=dtype, flops=2 * pairs * widths,
            m=s / c * heads_cut, n=s, k=qk_width, batch=b * h / heads_cut,
            read_bytes=read, written_bytes=written,
        )  # fmt: skip


def unfused_attention(
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
    ulysses: ArrayLike = False,
    share: ArrayLike = 1.0,
) -> None:
    """Adds attention as separate kernels: products of the whole square, and a masked softmax.

    Nothing is skipped for the mask, a window or documents. Forward writes the scores, reads
    them, writes their softmax and reads it for the values; backward makes both gradients of
    each product.
    """
    del kv_heads, window, share  # keys are repeated for every query head, and the square is whole
    b, s, h, c = (np.asarray(x, float) for x in (sequences, seq_len, heads, cp))
    heads_cut = np.where(np.asarray(ulysses, bool), c, 1.0)
    width, m, batch = DTYPE_BYTES[dtype], s / c * heads_cut, b * h / heads_cut
    scores, shape = batch * m * s * width, {"m": m, "n": s, "batch": batch}
    side = {w: batch * (m + s) * w * width for w in (qk_width, v_width)}

    def product(phase: Phase, part: str, inner: int, times: int = 1) -> None:
        cost.op(
            f"{name}.{part}", OpKind.GEMM, phase, dtype=dtype, kernel="unfused",
            flops=2 * batch * m * s * inner, k=inner, count=float(times), read_bytes=side[inner],
            written_bytes=scores, **shape,
        )  # fmt: skip

    def softmax(phase: Phase, reads: int) -> None:
        cost.op(
            f"{name}.softmax", OpKind.MEMORY_BOUND, phase, dtype=dtype, kernel="unfused",
            m=batch * m * s, read_bytes=reads * scores, written_bytes=scores,
        )  # fmt: skip

    product(Phase.FORWARD, "scores", qk_width)
    softmax(Phase.FORWARD, 1)
    product(Phase.FORWARD, "values", v_width)
    product(Phase.BACKWARD_INPUT, "values", v_width, 2)
    softmax(Phase.BACKWARD_INPUT, 2)
    product(Phase.BACKWARD_INPUT, "scores", qk_width, 2)
