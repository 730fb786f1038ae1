"""The gradients of causal flash attention as Triton kernels (arXiv 2205.14135, algorithm 4).

The gradients of a shared key head are summed inside one program, over its query heads, so
that nothing depends on timing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.attention.kernel import constants_of, positions, sizes_of
from flopwright.kernels.attention.tiles import tiles
from flopwright.kernels.device import LOG2E, cast, dot, product
from flopwright.kernels.launch import ceil_div, launch, power_of_2, target

_ROWS: Final = 16  # of a program that sums gradient times result


@triton.jit
def _delta(
    g_ptr, out_ptr, delta_ptr, rows, seq, heads, v_width, R: tl.constexpr, DV: tl.constexpr
):
    """delta[b, h, s] = sum over the width of gradient times result."""
    row = tl.program_id(0) * R + tl.arange(0, R)  # of [B, S, H]
    dv = tl.arange(0, DV)
    inside = (row < rows)[:, None] & (dv < v_width)[None, :]
    place = row.to(tl.int64)[:, None] * v_width + dv[None, :]
    g = tl.load(g_ptr + place, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(out_ptr + place, mask=inside, other=0.0).to(tl.float32)
    h, position = row % heads, row // heads
    to = (position // seq * heads + h) * seq + position % seq
    tl.store(delta_ptr + to, tl.sum(g * out, 1), mask=row < rows)


@triton.jit
def _keys(
    g_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, scale, seq, heads, repeat,
    window, width, v_width, q_stride, k_stride, v_stride,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradients of one block of keys and values of one key head, over its query heads."""
    first = tl.program_id(0) * BN
    groups = heads // repeat
    b, g = (tl.program_id(1) // groups).to(tl.int64), tl.program_id(1) % groups
    key = first + tl.arange(0, BN)
    d1, d2, dv = tl.arange(0, D1), D1 + tl.arange(0, max(D2, 16)), tl.arange(0, DV)
    in1, in2, in_v = d1 < width, d2 < width, dv < v_width
    k = k_ptr + (b * seq + key)[:, None] * k_stride + g * width
    k1 = tl.load(k + d1[None, :], mask=(key < seq)[:, None] & in1[None, :], other=0.0)
    v = v_ptr + (b * seq + key)[:, None] * v_stride + g * v_width + dv[None, :]
    v = tl.load(v, mask=(key < seq)[:, None] & in_v[None, :], other=0.0)
    grad_k1 = tl.zeros((BN, D1), dtype=tl.float32)
    grad_v = tl.zeros((BN, DV), dtype=tl.float32)
    if D2:
        k2 = tl.load(k + d2[None, :], mask=(key < seq)[:, None] & in2[None, :], other=0.0)
        grad_k2 = tl.zeros((BN, D2), dtype=tl.float32)
    last = seq
    if WINDOW:
        last = tl.minimum(seq, first + BN + window - 1)
    begin = first // BM * BM
    steps = tl.cdiv(last - begin, BM)
    for step in range(steps * repeat):  # one loop over heads and blocks of queries
        h = g * repeat + step // steps
        row = begin + step % steps * BM + tl.arange(0, BM)
        place = (b * seq + row)[:, None]
        q = q_ptr + place * q_stride + h * width
        q1 = tl.load(q + d1[None, :], mask=(row < seq)[:, None] & in1[None, :], other=0.0)
        s = product(q1, tl.trans(k1))
        if D2:
            q2 = tl.load(q + d2[None, :], mask=(row < seq)[:, None] & in2[None, :], other=0.0)
            s = dot(q2, tl.trans(k2), s)
        statistic = (b * heads + h) * seq + row
        lse = tl.load(lse_ptr + statistic, mask=row < seq, other=float("inf"))
        delta = tl.load(delta_ptr + statistic, mask=row < seq, other=0.0)
        seen = (key[None, :] <= row[:, None]) & (row < seq)[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > row[:, None] - window)
        p = tl.where(seen, tl.exp2((s * scale - lse[:, None]) * LOG2E), 0.0)
        grad = tl.load(
            g_ptr + (place * heads + h) * v_width + dv[None, :],
            mask=(row < seq)[:, None] & in_v[None, :], other=0.0,
        )  # fmt: skip
        grad_v = dot(tl.trans(cast(p, grad.dtype)), grad, grad_v)
        ds = p * (product(grad, tl.trans(v)) - delta[:, None]) * scale
        ds = tl.trans(cast(ds, q1.dtype))
        grad_k1 = dot(ds, q1, grad_k1)
        if D2:
            grad_k2 = dot(ds, q2, grad_k2)
    at = (b * seq + key)[:, None] * groups + g
    tl.store(
        dk_ptr + at * width + d1[None, :], cast(grad_k1, dk_ptr.dtype.element_ty),
        mask=(key < seq)[:, None] & in1[None, :],
    )  # fmt: skip
    if D2:
        tl.store(
            dk_ptr + at * width + d2[None, :], cast(grad_k2, dk_ptr.dtype.element_ty),
            mask=(key < seq)[:, None] & in2[None, :],
        )  # fmt: skip
    tl.store(
        dv_ptr + at * v_width + dv[None, :], cast(grad_v, dv_ptr.dtype.element_ty),
        mask=(key < seq)[:, None] & in_v[None, :],
    )  # fmt: skip


@triton.jit
def _queries(
    g_ptr, q_ptr, k_ptr, v_ptr, lse_ptr, delta_ptr, dq_ptr, scale, seq, heads, repeat, window,
    width, v_width, q_stride, k_stride, v_stride,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Gradient of one block of queries of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    first = block * BM
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    g = h // repeat
    row = first + tl.arange(0, BM)
    d1, d2, dv = tl.arange(0, D1), D1 + tl.arange(0, max(D2, 16)), tl.arange(0, DV)
    in1, in2, in_v = d1 < width, d2 < width, dv < v_width
    place = (b * seq + row)[:, None]
    q = q_ptr + place * q_stride + h * width
    q1 = tl.load(q + d1[None, :], mask=(row < seq)[:, None] & in1[None, :], other=0.0)
    grad = tl.load(
        g_ptr + (place * heads + h) * v_width + dv[None, :],
        mask=(row < seq)[:, None] & in_v[None, :], other=0.0,
    )  # fmt: skip
    statistic = (b * heads + h) * seq + row
    lse = tl.load(lse_ptr + statistic, mask=row < seq, other=float("inf"))
    delta = tl.load(delta_ptr + statistic, mask=row < seq, other=0.0)
    grad_q1 = tl.zeros((BM, D1), dtype=tl.float32)
    if D2:
        q2 = tl.load(q + d2[None, :], mask=(row < seq)[:, None] & in2[None, :], other=0.0)
        grad_q2 = tl.zeros((BM, D2), dtype=tl.float32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BN * BN
    for start in range(begin, tl.minimum(first + BM, seq), BN):
        key = start + tl.arange(0, BN)
        there = (key < seq)[:, None]
        k = k_ptr + (b * seq + key)[:, None] * k_stride + g * width
        k1 = tl.load(k + d1[None, :], mask=there & in1[None, :], other=0.0)
        s = product(q1, tl.trans(k1))
        if D2:
            k2 = tl.load(k + d2[None, :], mask=there & in2[None, :], other=0.0)
            s = dot(q2, tl.trans(k2), s)
        seen = key[None, :] <= row[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > row[:, None] - window)
        p = tl.where(seen, tl.exp2((s * scale - lse[:, None]) * LOG2E), 0.0)
        v = v_ptr + (b * seq + key)[:, None] * v_stride + g * v_width + dv[None, :]
        v = tl.load(v, mask=there & in_v[None, :], other=0.0)
        ds = cast(p * (product(grad, tl.trans(v)) - delta[:, None]) * scale, k1.dtype)
        grad_q1 = dot(ds, k1, grad_q1)
        if D2:
            grad_q2 = dot(ds, k2, grad_q2)
    dq = dq_ptr + (place * heads + h) * width
    tl.store(
        dq + d1[None, :], cast(grad_q1, dq_ptr.dtype.element_ty),
        mask=(row < seq)[:, None] & in1[None, :],
    )  # fmt: skip
    if D2:
        tl.store(
            dq + d2[None, :], cast(grad_q2, dq_ptr.dtype.element_ty),
            mask=(row < seq)[:, None] & in2[None, :],
        )  # fmt: skip


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of q, k and v."""
    q, k, v = positions(q), positions(k), positions(v)
    grad, out, lse = grad.contiguous(), out.contiguous(), lse.contiguous()
    batch, seq, heads, width = q.shape
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta, rows = lse.new_empty(lse.shape), batch * seq * heads
    launch(
        _delta, (ceil_div(rows, _ROWS),), grad, out, delta, rows, seq, heads, v.shape[3],
        R=_ROWS, DV=power_of_2(v.shape[3], 16),
    )  # fmt: skip
    common = (grad, q, k, v, lse, delta)
    sizes = sizes_of(q, k, v, window)
    _, for_keys, for_queries = tiles(q.dtype, target(q.device), width)
    t = for_keys
    launch(
        _keys, (ceil_div(seq, t.n), batch * k.shape[2]), *common, grads[1], grads[2], scale,
        *sizes, **constants_of(t, q, v, window), num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    t = for_queries
    launch(
        _queries, (ceil_div(seq, t.m), batch * heads), *common, grads[0], scale, *sizes,
        **constants_of(t, q, v, window), num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return grads
