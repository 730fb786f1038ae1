"""One matrix product an expert as Triton kernels; the rows of each are read on the device.

A grid has as many row tiles as the rows could need: one more than full ones for each expert.
A program finds its expert among the counts, so the host waits for nothing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast, dot
from flopwright.kernels.launch import (
    Target,
    ceil_div,
    launch,
    power_of_2,
    target,
    unit_columns,
)

_TOGETHER: Final = 8  # row tiles that share a tile of weights while it is in the L2 cache


@triton.jit
def _grouped_gemm(
    x_ptr, w_ptr, y_ptr, counts_ptr, experts, row_tiles, width_in, width_out,
    x_stride, w_stride_expert, w_stride_out, w_stride_in,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    TOGETHER: tl.constexpr,
):  # fmt: skip
    """y[rows of e] = x[rows of e] @ w[e], w as [in, out] by its strides."""
    program = tl.program_id(0)
    column_tiles = tl.cdiv(width_out, BN)
    first = program // (TOGETHER * column_tiles) * TOGETHER
    tall = tl.minimum(row_tiles - first, TOGETHER)
    inside = program % (TOGETHER * column_tiles)
    tile, column_tile = first + inside % tall, inside // tall

    expert = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + expert, mask=expert < experts, other=0).to(tl.int32)
    tiles = (counts + BM - 1) // BM
    before = tl.cumsum(tiles, 0) <= tile
    e = tl.sum(before.to(tl.int32), 0)
    if e < experts:
        start = tl.sum(tl.where(before, counts, 0), 0)
        mine = tl.sum(tl.where(expert == e, counts, 0), 0)
        row = (tile - tl.sum(tl.where(before, tiles, 0), 0)) * BM + tl.arange(0, BM)
        rows = (start + row).to(tl.int64)
        out = column_tile * BN + tl.arange(0, BN)
        inner = tl.arange(0, BK)
        x = x_ptr + rows[:, None] * x_stride + inner[None, :]
        w = w_ptr + e.to(tl.int64) * w_stride_expert
        w += inner[:, None] * w_stride_in + out[None, :] * w_stride_out
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, width_in, BK):
            there = inner < width_in - k
            a = tl.load(x, mask=(row[:, None] < mine) & there[None, :], other=0.0)
            b = tl.load(w, mask=there[:, None] & (out[None, :] < width_out), other=0.0)
            acc = dot(a, b, acc)
            x += BK
            w += BK * w_stride_in
        y = y_ptr + rows[:, None] * width_out + out[None, :]
        inside_y = (row[:, None] < mine) & (out[None, :] < width_out)
        tl.store(y, cast(acc, y_ptr.dtype.element_ty), mask=inside_y)


@triton.jit
def _weight_gradient(
    g_ptr, x_ptr, dw_ptr, counts_ptr, experts, width_out, width_in, g_stride, x_stride,
    EXPERTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dw[e] = g[rows of e]^T @ x[rows of e], [out, in]; zeros for an expert without rows."""
    e = tl.program_id(1)
    column_tiles = tl.cdiv(width_in, BN)
    out = tl.program_id(0) // column_tiles * BM + tl.arange(0, BM)
    column = tl.program_id(0) % column_tiles * BN + tl.arange(0, BN)
    expert = tl.arange(0, EXPERTS)
    counts = tl.load(counts_ptr + expert, mask=expert < experts, other=0).to(tl.int32)
    start = tl.sum(tl.where(expert < e, counts, 0), 0).to(tl.int64)
    mine = tl.sum(tl.where(expert == e, counts, 0), 0)
    inner = tl.arange(0, BK)
    g = g_ptr + (start + inner)[None, :] * g_stride + out[:, None]
    x = x_ptr + (start + inner)[:, None] * x_stride + column[None, :]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, mine, BK):
        there = inner < mine - k
        a = tl.load(g, mask=there[None, :] & (out[:, None] < width_out), other=0.0)
        b = tl.load(x, mask=there[:, None] & (column[None, :] < width_in), other=0.0)
        acc = dot(a, b, acc)
        g += BK * g_stride
        x += BK * x_stride
    dw = dw_ptr + e.to(tl.int64) * width_out * width_in
    dw += out[:, None].to(tl.int64) * width_in + column[None, :]
    inside = (out[:, None] < width_out) & (column[None, :] < width_in)
    tl.store(dw, cast(acc, dw_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes of a product and how many warps and stages it runs with."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


def tiles(dtype: torch.dtype, place: Target, rows: int, experts: int) -> Tiles:
    """Returns the tiles of a product.

    Args:
        rows, experts: of a mean of fewer than 64 rows an expert, tiles are 64 rows high.
    """
    if place.name == "interpreter":
        return Tiles(32, 64, 64, 4, 1)
    if dtype == torch.float32:
        return Tiles(64, 64, 16, 4, 2)
    tall = 128 if rows > 64 * experts else 64
    if place.shared_bytes < 128 * 1024:
        return Tiles(tall, 128, 64, 8, 2)
    return Tiles(tall, 128, 64, 8, 3 if place.name == "sm_80" else 4)


def _product(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    experts, out, inner = weight.shape
    _, stride_out, stride_in = weight.stride()
    if transposed:
        out, inner, stride_out, stride_in = inner, out, stride_in, stride_out
    rows = x.shape[0]
    y = x.new_empty(rows, out)
    t = tiles(x.dtype, target(x.device), rows, experts)
    row_tiles = rows // t.m + min(experts, rows)
    launch(
        _grouped_gemm, (row_tiles * ceil_div(out, t.n),), x, weight, y, counts.contiguous(),
        experts, row_tiles, inner, out, x.stride(0), weight.stride(0), stride_out, stride_in,
        EXPERTS=power_of_2(experts, 32), BM=t.m, BN=t.n, BK=t.k, TOGETHER=_TOGETHER,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return y


def forward(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns y [N, out]; see `reference.grouped_gemm`."""
    return _product(unit_columns(x), weight, counts, False)


def input_gradient(grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns the gradient of x [N, in]."""
    return _product(unit_columns(grad), weight, counts, True)


def weight_gradient(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Returns the gradient of weight [E, out, in]; experts without rows get zero."""
    grad, x = unit_columns(grad), unit_columns(x)
    experts, out, inner = counts.shape[0], grad.shape[1], x.shape[1]
    grad_weight = grad.new_empty(experts, out, inner)
    t = tiles(x.dtype, target(x.device), 128 * experts, experts)
    launch(
        _weight_gradient, (ceil_div(out, t.m) * ceil_div(inner, t.n), experts), grad, x,
        grad_weight, counts.contiguous(), experts, out, inner, grad.stride(0), x.stride(0),
        EXPERTS=power_of_2(experts, 32), BM=t.m, BN=t.n, BK=t.k,
        num_warps=t.num_warps, num_stages=t.num_stages,
    )  # fmt: skip
    return grad_weight
