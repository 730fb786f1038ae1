"""Causal flash attention as Triton kernels (arXiv 2205.14135, 2307.08691).

The forward pass also gives the largest logit of each block of rows, of which QK-Clip wants
the maximum by head. A query width that is no power of two is taken in two parts: 192 is 128
and 64. The way back is in `backward.py`.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.attention.tiles import Tiles, tiles
from flopwright.kernels.device import LN2, LOG2E, cast, dot, product
from flopwright.kernels.launch import ceil_div, launch, power_of_2, target

_WIDEST: Final = 128  # the first part of a width that is no power of two


@triton.jit
def _logits(q1, q2, k1_ptr, k2_ptr, key, seq, k_stride, in1, in2, D2: tl.constexpr):
    """Returns q @ k^T [BM, BN] over both parts of the width.

    Keys are turned in the product as in the backward pass: logits of both are equal to the
    bit, without which a probability of 1 is not 1 where logits are large.
    """
    there = key < seq
    offset = key.to(tl.int64)[:, None] * k_stride
    k1 = tl.load(k1_ptr + offset, mask=there[:, None] & in1[None, :], other=0.0)
    s = product(q1, tl.trans(k1))
    if D2:
        k2 = tl.load(k2_ptr + offset, mask=there[:, None] & in2[None, :], other=0.0)
        s = dot(q2, tl.trans(k2), s)
    return s


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, best_ptr, scale, seq, heads, repeat, window,
    width, v_width, q_stride, k_stride, v_stride,
    BM: tl.constexpr, BN: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head: its result, log-sum-exps and largest logit.

    Strides are of a position; heads of one position lie next to each other.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    g = h // repeat
    first = block * BM
    row = first + tl.arange(0, BM)
    d1, d2, dv = tl.arange(0, D1), D1 + tl.arange(0, max(D2, 16)), tl.arange(0, DV)
    in1, in2, in_v = d1 < width, d2 < width, dv < v_width
    q = q_ptr + (b * seq + row)[:, None] * q_stride + h * width
    q1 = tl.load(q + d1[None, :], mask=(row < seq)[:, None] & in1[None, :], other=0.0)
    q2 = q1
    if D2:
        q2 = tl.load(q + d2[None, :], mask=(row < seq)[:, None] & in2[None, :], other=0.0)
    k1_ptr = k_ptr + b * seq * k_stride + g * width + d1[None, :]
    k2_ptr = k_ptr + b * seq * k_stride + g * width + d2[None, :]
    v_ptr += b * seq * v_stride + g * v_width + dv[None, :]
    c = scale * LOG2E
    m = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    acc = tl.zeros((BM, DV), dtype=tl.float32)
    last = tl.minimum(first + BM, seq)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first - window + 1, 0) // BN * BN
    # Blocks of keys that all rows see need no mask; with a window all are masked.
    whole = begin
    if not WINDOW:
        whole = first // BN * BN
    for start in range(begin, whole, BN):
        key = start + tl.arange(0, BN)
        s = _logits(q1, q2, k1_ptr, k2_ptr, key, seq, k_stride, in1, in2, D2)
        best = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2((s - best[:, None]) * c)
        shrink = tl.exp2((m - best) * c)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_ptr + key.to(tl.int64)[:, None] * v_stride, mask=in_v[None, :], other=0.0)
        acc = dot(cast(p, v.dtype), v, acc * shrink[:, None])
        m = best
    for start in range(whole, last, BN):
        key = start + tl.arange(0, BN)
        s = _logits(q1, q2, k1_ptr, k2_ptr, key, seq, k_stride, in1, in2, D2)
        seen = key[None, :] <= row[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > row[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        best = tl.maximum(m, tl.max(s, 1))
        # A row that has seen no key yet: every difference below is from -inf.
        level = tl.where(best == float("-inf"), 0.0, best)
        p = tl.exp2((s - level[:, None]) * c)
        shrink = tl.exp2((m - level) * c)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(
            v_ptr + key.to(tl.int64)[:, None] * v_stride,
            mask=(key < seq)[:, None] & in_v[None, :], other=0.0,
        )  # fmt: skip
        acc = dot(cast(p, v.dtype), v, acc * shrink[:, None])
        m = best
    out = out_ptr + ((b * seq + row) * heads + h)[:, None] * v_width + dv[None, :]
    y = cast(acc / total[:, None], out_ptr.dtype.element_ty)
    tl.store(out, y, mask=(row < seq)[:, None] & in_v[None, :])
    place = (b * heads + h) * seq + row
    tl.store(lse_ptr + place, m * scale + tl.log2(total) * LN2, mask=row < seq)
    highest = tl.max(tl.where(row < seq, m, float("-inf")), 0) * scale
    tl.store(best_ptr + (b * heads + h) * tl.num_programs(0) + block, highest)


def _parts(width: int) -> tuple[int, int]:
    """Returns the two parts of a query width, powers of two from 16 on (0 for no second)."""
    if width <= _WIDEST or width == power_of_2(width):
        return power_of_2(width, 16), 0
    return _WIDEST, power_of_2(width - _WIDEST, 16)


def positions(x: Tensor) -> Tensor:
    """Returns x, its heads next to each other within a position and batches behind positions."""
    b, s, h, d = x.shape
    _, position, head, column = x.stride()
    plain = column == 1 and (head == d or h == 1) and (x.stride(0) == s * position or b == 1)
    return x if plain else x.contiguous()


def sizes_of(q: Tensor, k: Tensor, v: Tensor, window: int) -> tuple[int, ...]:
    """Returns sizes and strides as the kernels take them."""
    seq, heads, width = q.shape[1:]
    return (
        seq, heads, heads // k.shape[2], window, width, v.shape[3], q.stride(1), k.stride(1),
        v.stride(1),
    )  # fmt: skip


def constants_of(t: Tiles, q: Tensor, v: Tensor, window: int) -> dict[str, int | bool]:
    """Returns the kernels' constants."""
    d1, d2 = _parts(q.shape[3])
    return {
        "BM": t.m, "BN": t.n, "D1": d1, "D2": d2, "DV": power_of_2(v.shape[3], 16),
        "WINDOW": 0 < window < q.shape[1],
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (output [B, S, H, V], log-sum-exp [B, H, S], largest logit by head [H])."""
    q, k, v = positions(q), positions(k), positions(v)
    batch, seq, heads, width = q.shape
    out = q.new_empty(batch, seq, heads, v.shape[3])
    lse = q.new_empty(batch, heads, seq, dtype=torch.float32)
    t = tiles(q.dtype, target(q.device), width)[0]
    blocks = ceil_div(seq, t.m)
    best = q.new_empty(batch, heads, blocks, dtype=torch.float32)
    launch(
        _forward, (blocks, batch * heads), q, k, v, out, lse, best, scale,
        *sizes_of(q, k, v, window), **constants_of(t, q, v, window), num_warps=t.num_warps,
        num_stages=t.num_stages,
    )  # fmt: skip
    highest = best.amax((0, 2)) if best.numel() else best.new_full((heads,), float("-inf"))
    return out, lse, highest
