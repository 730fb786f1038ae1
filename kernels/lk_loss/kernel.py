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
from flopwright.kernels.lk_loss.reference import FAR, NEAR, Side

_NEAR, _FAR = tl.constexpr(NEAR), tl.constexpr(FAR)


@triton.jit
def _log_probabilities(
    x_ptr, w_ptr, lse_ptr, row, column, rows, columns, hidden, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Returns them [BM, BN], -inf outside."""
    z = logits_tile(
        x_ptr, w_ptr, row, column, rows, columns, hidden, x_stride, w_stride, BM, BN, BK
    )
    level = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    log_sum = tl.load(lse_ptr + rows + row, mask=row < rows, other=0.0)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.where(inside, (z - level[:, None]) - log_sum[:, None], float("-inf"))


@triton.jit
def _base(highest):
    """Returns the level of a sum of e^x: none where it keeps its digits without one."""
    return tl.where(highest > _NEAR, 0.0, highest)


@triton.jit
def _overlap(
    q_ptr, wq_ptr, lse_q_ptr, p_ptr, wp_ptr, lse_p_ptr, base_ptr, overlap_ptr, below_ptr, rows,
    vocab, hidden_q, hidden_p, q_stride, wq_stride, p_stride, wp_stride, tiles,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of one part of the vocabulary: sum of min(p, q), and of q where it is below p.

    Both are over e^base, which is written too.
    """
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    highest = tl.full((BM,), _FAR, dtype=tl.float32)
    overlap = tl.zeros((BM,), dtype=tl.float32)
    below = tl.zeros((BM,), dtype=tl.float32)
    first = part * tiles * BN
    for start in range(first, tl.minimum(first + tiles * BN, vocab), BN):
        column = start + tl.arange(0, BN)
        q = _log_probabilities(
            q_ptr, wq_ptr, lse_q_ptr, row, column, rows, vocab, hidden_q, q_stride, wq_stride,
            BM, BN, BK,
        )  # fmt: skip
        p = _log_probabilities(
            p_ptr, wp_ptr, lse_p_ptr, row, column, rows, vocab, hidden_p, p_stride, wp_stride,
            BM, BN, BK,
        )  # fmt: skip
        less = tl.minimum(p, q, propagate_nan=tl.PropagateNan.ALL)
        higher = tl.maximum(highest, tl.max(less, 1))
        shrink = tl.exp2((_base(highest) - _base(higher)) * LOG2E)
        terms = tl.exp2((less - _base(higher)[:, None]) * LOG2E)
        overlap = overlap * shrink + tl.sum(terms, 1)
        below = below * shrink + tl.sum(tl.where(q < p, terms, 0.0), 1)
        highest = higher
    place = part.to(tl.int64) * rows + row
    tl.store(base_ptr + place, _base(highest), mask=row < rows)
    tl.store(overlap_ptr + place, overlap, mask=row < rows)
    tl.store(below_ptr + place, below, mask=row < rows)


@triton.jit
def _gradient(
    q_ptr, wq_ptr, lse_q_ptr, p_ptr, wp_ptr, lse_p_ptr, overlap_ptr, below_ptr, grad_ptr, d_ptr,
    rows, first, end, hidden_q, hidden_p, q_stride, wq_stride, p_stride, wp_stride, d_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Columns first .. end of the gradient; see the reference's."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    column = first + place
    q = _log_probabilities(
        q_ptr, wq_ptr, lse_q_ptr, row, column, rows, end, hidden_q, q_stride, wq_stride,
        BM, BN, BK,
    )  # fmt: skip
    p = _log_probabilities(
        p_ptr, wp_ptr, lse_p_ptr, row, column, rows, end, hidden_p, p_stride, wp_stride,
        BM, BN, BK,
    )  # fmt: skip
    overlap = tl.load(overlap_ptr + row, mask=row < rows, other=0.0)
    below = tl.load(below_ptr + row, mask=row < rows, other=0.0)
    least = below * tl.exp2(overlap * LOG2E) - 1.0
    under = tl.exp2(tl.minimum(q - overlap[:, None], 0.0) * LOG2E) * least[:, None]
    d = tl.where(q < p, under, tl.exp2(q * LOG2E) * below[:, None])
    d *= tl.load(grad_ptr) / rows
    to = d_ptr + row.to(tl.int64)[:, None] * d_stride + place[None, :]
    inside = (row < rows)[:, None] & (column < end)[None, :]
    tl.store(to, cast(d, d_ptr.dtype.element_ty), mask=inside)


def _tiles(x: Tensor) -> Tiles:
    """Returns those of one head's product, half as wide: two tiles of logits stand at a time."""
    t = tiles(x.dtype, target(x.device))
    return t if t.n < 128 else replace(t, n=t.n // 2)


def overlap(draft: Side, goal: Side) -> tuple[Tensor, Tensor]:
    """Returns (log of the sum of min(p, q), share of it where q < p), each [N] in fp32."""
    (x, w, lse_q), (y, u, lse_p) = draft, goal
    rows, vocab, t = x.shape[0], w.shape[0], _tiles(x)
    parts, per_part = parts_of(rows, vocab, t)
    base, shared, below = (x.new_empty(parts, rows, dtype=torch.float32) for _ in range(3))
    launch(
        _overlap, (ceil_div(rows, t.m), parts), x, w, lse_q, y, u, lse_p, base, shared,
        below, rows, vocab, x.shape[1], y.shape[1], x.stride(0), w.stride(0), y.stride(0),
        u.stride(0), per_part, **t.constants,
    )  # fmt: skip
    level = base.amax(0)
    share = (base - level).exp()
    total = (share * shared).sum(0)
    return level + total.log(), (share * below).sum(0) / total


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
