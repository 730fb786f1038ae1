"""The overlap of two heads' distributions as Triton kernels, without their logits in memory."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import LOG2E, cast
from flopwright.kernels.launch import ceil_div, launch, target
from flopwright.kernels.linear_cross_entropy.kernel import Tiles, logits_tile, parts_of, tiles


@triton.jit
def _probabilities(
    x_ptr, w_ptr, lse_ptr, row, column, rows, columns, hidden, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    z = logits_tile(
        x_ptr, w_ptr, row, column, rows, columns, hidden, x_stride, w_stride, BM, BN, BK
    )
    lse = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.where(inside, tl.exp2((z - lse[:, None]) * LOG2E), 0.0)


@triton.jit
def _overlap(
    q_ptr, wq_ptr, lse_q_ptr, p_ptr, wp_ptr, lse_p_ptr, overlap_ptr, below_ptr, rows, vocab,
    hidden_q, hidden_p, q_stride, wq_stride, p_stride, wp_stride, tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of one part of the vocabulary: sum of min(p, q), and of q where it is below p."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    overlap = tl.zeros((BM,), dtype=tl.float32)
    below = tl.zeros((BM,), dtype=tl.float32)
    first = part * tiles * BN
    for start in range(first, tl.minimum(first + tiles * BN, vocab), BN):
        column = start + tl.arange(0, BN)
        q = _probabilities(
            q_ptr, wq_ptr, lse_q_ptr, row, column, rows, vocab, hidden_q, q_stride, wq_stride,
            BM, BN, BK,
        )  # fmt: skip
        p = _probabilities(
            p_ptr, wp_ptr, lse_p_ptr, row, column, rows, vocab, hidden_p, p_stride, wp_stride,
            BM, BN, BK,
        )  # fmt: skip
        overlap += tl.sum(tl.minimum(p, q), 1)
        below += tl.sum(tl.where(q < p, q, 0.0), 1)
    place = part.to(tl.int64) * rows + row
    tl.store(overlap_ptr + place, overlap, mask=row < rows)
    tl.store(below_ptr + place, below, mask=row < rows)


@triton.jit
def _gradient(
    q_ptr, wq_ptr, lse_q_ptr, p_ptr, wp_ptr, lse_p_ptr, overlap_ptr, below_ptr, grad_ptr, d_ptr,
    rows, first, end, hidden_q, hidden_p, q_stride, wq_stride, p_stride, wp_stride, d_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """d = -q (1[q < p] - below) / overlap * grad / rows, for columns first .. end."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    column = first + place
    q = _probabilities(
        q_ptr, wq_ptr, lse_q_ptr, row, column, rows, end, hidden_q, q_stride, wq_stride,
        BM, BN, BK,
    )  # fmt: skip
    p = _probabilities(
        p_ptr, wp_ptr, lse_p_ptr, row, column, rows, end, hidden_p, p_stride, wp_stride,
        BM, BN, BK,
    )  # fmt: skip
    overlap = tl.load(overlap_ptr + row, mask=row < rows, other=1.0)
    below = tl.load(below_ptr + row, mask=row < rows, other=0.0)
    d = q * (below[:, None] - (q < p).to(tl.float32)) / overlap[:, None]
    d *= tl.load(grad_ptr) / rows
    to = d_ptr + row.to(tl.int64)[:, None] * d_stride + place[None, :]
    inside = (row < rows)[:, None] & (column < end)[None, :]
    tl.store(to, cast(d, d_ptr.dtype.element_ty), mask=inside)


def _tiles(x: Tensor) -> Tiles:
    """Returns those of one head's product, half as wide: two tiles of logits stand at a time."""
    t = tiles(x.dtype, target(x.device))
    return t if t.n < 128 else replace(t, n=t.n // 2)


Side = tuple[Tensor, Tensor, Tensor]  # hidden states [N, H], weight [V, H], log-sum-exp [N]


def overlap(draft: Side, goal: Side) -> tuple[Tensor, Tensor]:
    """Returns (sum of min(p, q), sum of q where q < p), each [N] in fp32."""
    (x, w, lse_q), (y, u, lse_p) = draft, goal
    rows, vocab, t = x.shape[0], w.shape[0], _tiles(x)
    parts, per_part = parts_of(rows, vocab, t)
    both = [x.new_empty(parts, rows, dtype=torch.float32) for _ in range(2)]
    launch(
        _overlap, (ceil_div(rows, t.m), parts), x, w, lse_q, y, u, lse_p, *both, rows, vocab,
        x.shape[1], y.shape[1], x.stride(0), w.stride(0), y.stride(0), u.stride(0), per_part,
        **t.constants,
    )  # fmt: skip
    return both[0].sum(0), both[1].sum(0)


def gradient_part(
    draft: Side, goal: Side, shared: Tensor, below: Tensor, grad: Tensor, first: int, end: int
) -> Tensor:
    """Returns the gradient [N, end - first] of the draft's logits of these columns."""
    (x, w, lse_q), (y, u, lse_p) = draft, goal
    rows, t = x.shape[0], _tiles(x)
    d = x.new_empty(rows, end - first)
    launch(
        _gradient, (ceil_div(rows, t.m), ceil_div(end - first, t.n)), x, w, lse_q, y, u, lse_p,
        shared, below, grad, d, rows, first, end, x.shape[1], y.shape[1], x.stride(0), w.stride(0),
        y.stride(0), u.stride(0), d.stride(0), **t.constants,
    )  # fmt: skip
    return d
