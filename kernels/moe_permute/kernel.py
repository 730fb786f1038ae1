"""Sorting rows by expert and back as Triton kernels: gathers, each row read and written once.

Sums over a token's rows are made in fp32, in the order of its choices.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast
from flopwright.kernels.launch import ceil_div, launch, power_of_2, unit_columns

_WIDEST: Final = 4096  # columns a program moves at once


@triton.jit
def _gather(x_ptr, order_ptr, y_ptr, top_k, width, x_stride, BLOCK: tl.constexpr):
    """y[i] = x[order[i] / top_k]."""
    i = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(order_ptr + i) // top_k
    x = tl.load(x_ptr + token * x_stride + column, mask=column < width)
    tl.store(y_ptr + i * width + column, x, mask=column < width)


@triton.jit
def _sum(
    rows_ptr, weights_ptr, place_ptr, y_ptr, width, rows_stride,
    TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over j of (w[t, j] *) rows[place[t * top_k + j]]."""
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for j in tl.static_range(TOP_K):
        row = tl.load(place_ptr + t * TOP_K + j)
        x = tl.load(rows_ptr + row * rows_stride + column, mask=column < width, other=0.0)
        x = x.to(tl.float32)
        if WEIGHTED:
            x *= tl.load(weights_ptr + t * TOP_K + j).to(tl.float32)
        total += x
    y = cast(total, y_ptr.dtype.element_ty)
    tl.store(y_ptr + t * width + column, y, mask=column < width)


@triton.jit
def _spread(
    g_ptr, rows_ptr, weights_ptr, order_ptr, dx_ptr, dw_ptr, top_k, width, g_stride,
    rows_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx[i] = w[order[i]] * g[token of i]; dw[order[i]] = g[token of i] . rows[i]."""
    i = tl.program_id(0).to(tl.int64)
    choice = tl.load(order_ptr + i)
    g_ptr += choice // top_k * g_stride
    w = tl.load(weights_ptr + choice).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + column, mask=column < width, other=0.0).to(tl.float32)
        x = tl.load(rows_ptr + i * rows_stride + column, mask=column < width, other=0.0)
        total += g * x.to(tl.float32)
        dx = cast(g * w, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + i * width + column, dx, mask=column < width)
    tl.store(dw_ptr + choice, cast(tl.sum(total, 0), dw_ptr.dtype.element_ty))


def _block(width: int) -> int:
    return min(_WIDEST, power_of_2(width))


def permute(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Returns the tokens' rows [N, H] in expert order."""
    x, width = unit_columns(x), x.shape[1]
    y = x.new_empty(order.shape[0], width)
    block = _block(width)
    grid = (order.shape[0], ceil_div(width, block))
    launch(_gather, grid, x, order.contiguous(), y, top_k, width, x.stride(0), BLOCK=block)
    return y


def sum_choices(rows: Tensor, weights: Tensor | None, place: Tensor, top_k: int) -> Tensor:
    """Returns for each token the sum [T, H] of its rows, weighted where there are weights."""
    rows, width = unit_columns(rows), rows.shape[1]
    tokens = place.shape[0] // top_k
    y = rows.new_empty(tokens, width)
    block = _block(width)
    launch(
        _sum, (tokens, ceil_div(width, block)), rows,
        None if weights is None else weights.contiguous(), place.contiguous(), y, width,
        rows.stride(0), TOP_K=top_k, WEIGHTED=weights is not None, BLOCK=block,
    )  # fmt: skip
    return y


def unpermute_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows [N, H] and weights [T, k]."""
    grad, rows = unit_columns(grad), unit_columns(rows)
    grad_rows, grad_weights = rows.new_empty(rows.shape), weights.new_empty(weights.shape)
    launch(
        _spread, (rows.shape[0],), grad, rows, weights.contiguous(), order.contiguous(),
        grad_rows, grad_weights, weights.shape[1], rows.shape[1], grad.stride(0), rows.stride(0),
        BLOCK=_block(rows.shape[1]),
    )  # fmt: skip
    return grad_rows, grad_weights
