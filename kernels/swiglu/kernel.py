"""Gated activations as Triton kernels, with the option to keep their inputs in FP8.

SwiGLU: silu(g) u. SiTU-GLU: b1 tanh(g / b1) sigmoid(g) b2 tanh(u / b2), which is SwiGLU as both
bounds grow. The kernels that keep FP8 write codes and scales of tiles of 1 x 128 in the same
pass, and the backward pass reads those in place of the inputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast, e4m3_scale, largest_of, sigmoid, tanh, to_e4m3, within
from flopwright.kernels.launch import ceil_div, e4m3_dtype, launch, power_of_2, rows_of

TILE: Final = 128
_MOST: Final = 2048  # numbers a program handles


@triton.jit
def _values(g, u, b1, b2, SITU: tl.constexpr):
    """Returns the activation of fp32 g and u."""
    s = sigmoid(g)
    return b1 * tanh(g / b1) * s * (b2 * tanh(u / b2)) if SITU else g * s * u


@triton.jit
def _slopes(dy, g, u, b1, b2, SITU: tl.constexpr):
    """Returns the gradients of g and u."""
    s = sigmoid(g)
    if SITU:
        tg, tu = tanh(g / b1), tanh(u / b2)
        gated = b1 * tg * s
        dg = dy * (b2 * tu) * ((1.0 - tg * tg) * s + b1 * tg * s * (1.0 - s))
        du = dy * gated * (1.0 - tu * tu)
    else:
        dg = dy * u * s * (1.0 + g * (1.0 - s))
        du = dy * g * s
    return dg, du


@triton.jit
def _forward(
    g_ptr, u_ptr, y_ptr, b1, b2, width, g_stride, u_stride,
    SITU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + column, mask=inside, other=0.0).to(tl.float32)
    y = cast(_values(g, u, b1, b2, SITU), y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + column, y, mask=inside)


@triton.jit
def _backward(
    dy_ptr, g_ptr, u_ptr, dg_ptr, du_ptr, b1, b2, width, dy_stride, g_stride, u_stride, d_stride,
    SITU: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + column, mask=inside, other=0.0).to(tl.float32)
    dg, du = _slopes(dy, g, u, b1, b2, SITU)
    to = row * d_stride + column
    tl.store(dg_ptr + to, cast(dg, dg_ptr.dtype.element_ty), mask=inside)
    tl.store(du_ptr + to, cast(du, du_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _keep(x, codes_ptr, scales_ptr, place, tile, inside, LARGEST: tl.constexpr):
    """Writes [T, 128] numbers as codes, and a scale a tile."""
    scale = e4m3_scale(largest_of(x), LARGEST)
    scaled = within(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), LARGEST)
    tl.store(codes_ptr + place, to_e4m3(scaled, codes_ptr.dtype.element_ty), mask=inside)
    tl.store(scales_ptr + tile, scale, mask=tl.max(inside.to(tl.int32), 1) > 0)


@triton.jit
def _forward_fp8(
    g_ptr, u_ptr, y_ptr, g8_ptr, gs_ptr, u8_ptr, us_ptr, b1, b2, width, tiles, g_stride, u_stride,
    LARGEST: tl.constexpr, SITU: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * T + tl.arange(0, T)
    column = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    g = tl.load(g_ptr + row * g_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + row * u_stride + column, mask=inside, other=0.0).to(tl.float32)
    place = row * width + column
    y = cast(_values(g, u, b1, b2, SITU), y_ptr.dtype.element_ty)
    tl.store(y_ptr + place, y, mask=inside)
    _keep(g, g8_ptr, gs_ptr, place, row * tiles + tile, inside, LARGEST)
    _keep(u, u8_ptr, us_ptr, place, row * tiles + tile, inside, LARGEST)


@triton.jit
def _backward_fp8(
    dy_ptr, g8_ptr, gs_ptr, u8_ptr, us_ptr, dg_ptr, du_ptr, b1, b2, width, tiles, dy_stride,
    d_stride, SITU: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * T + tl.arange(0, T)
    column = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    place = row * width + column
    gs = tl.load(gs_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    us = tl.load(us_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    g = tl.load(g8_ptr + place, mask=inside, other=0.0).to(tl.float32) * gs[:, None]
    u = tl.load(u8_ptr + place, mask=inside, other=0.0).to(tl.float32) * us[:, None]
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    dg, du = _slopes(dy, g, u, b1, b2, SITU)
    to = row * d_stride + column
    tl.store(dg_ptr + to, cast(dg, dg_ptr.dtype.element_ty), mask=inside)
    tl.store(du_ptr + to, cast(du, du_ptr.dtype.element_ty), mask=inside)


Bounds = tuple[float, float] | None


def _situ(bounds: Bounds) -> tuple[float, float, bool]:
    return (1.0, 1.0, False) if bounds is None else (*bounds, True)


def _block(width: int) -> int:
    return min(_MOST, power_of_2(width, 16))


def forward(gate: Tensor, up: Tensor, bounds: Bounds = None) -> Tensor:
    """Returns the activation; bounds (b1, b2) make it SiTU-GLU."""
    g, u = rows_of(gate), rows_of(up)
    y = gate.new_empty(gate.shape)
    rows, width = g.shape
    b1, b2, situ = _situ(bounds)
    block = _block(width)
    launch(
        _forward, (rows, ceil_div(width, block)), g, u, y, b1, b2, width, g.stride(0), u.stride(0),
        SITU=situ, BLOCK=block,
    )  # fmt: skip
    return y


def backward(
    grad: Tensor, gate: Tensor, up: Tensor, bounds: Bounds = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up."""
    grads = gate.new_empty(gate.shape), up.new_empty(up.shape)
    _write_gradients(grad, gate, up, grads, bounds, gate.shape[-1])
    return grads


def backward_packed(grad: Tensor, gate: Tensor, up: Tensor, bounds: Bounds = None) -> Tensor:
    """Returns both gradients side by side in one tensor."""
    width = gate.shape[-1]
    both = gate.new_empty(*gate.shape[:-1], 2 * width)
    _write_gradients(grad, gate, up, (both[..., :width], both[..., width:]), bounds, 2 * width)
    return both


def _write_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, to: tuple[Tensor, Tensor], bounds: Bounds, stride: int
) -> None:
    dy, g, u = rows_of(grad), rows_of(gate), rows_of(up)
    rows, width = g.shape
    b1, b2, situ = _situ(bounds)
    block = _block(width)
    launch(
        _backward, (rows, ceil_div(width, block)), dy, g, u, *to, b1, b2, width, dy.stride(0),
        g.stride(0), u.stride(0), stride, SITU=situ, BLOCK=block,
    )  # fmt: skip


def _tiles_a_program(width: int) -> int:
    return min(_MOST // TILE, power_of_2(ceil_div(width, TILE)))


def forward_fp8(
    gate: Tensor, up: Tensor, bounds: Bounds = None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (activation, codes and scales of gate, codes and scales of up)."""
    dtype = e4m3_dtype(gate.device)
    g, u = rows_of(gate), rows_of(up)
    rows, width = g.shape
    tiles = ceil_div(width, TILE)
    y = gate.new_empty(gate.shape)
    codes = [gate.new_empty(gate.shape, dtype=dtype) for _ in range(2)]
    scales = [gate.new_empty((*gate.shape[:-1], tiles), dtype=torch.float32) for _ in range(2)]
    b1, b2, situ = _situ(bounds)
    together = _tiles_a_program(width)
    launch(
        _forward_fp8, (rows, ceil_div(tiles, together)), g, u, y, codes[0], scales[0], codes[1],
        scales[1], b1, b2, width, tiles, g.stride(0), u.stride(0),
        LARGEST=float(torch.finfo(dtype).max), SITU=situ, T=together,
    )  # fmt: skip
    return y, codes[0], scales[0], codes[1], scales[1]


Kept = tuple[Tensor, Tensor]  # codes, scales


def backward_fp8(
    grad: Tensor, gate: Kept, up: Kept, bounds: Bounds = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients, from what is kept of gate and up."""
    grads = grad.new_empty(grad.shape), grad.new_empty(grad.shape)
    _write_gradients_fp8(grad, gate, up, grads, bounds, grad.shape[-1])
    return grads


def backward_fp8_packed(grad: Tensor, gate: Kept, up: Kept, bounds: Bounds = None) -> Tensor:
    """Returns both gradients side by side in one tensor."""
    width = grad.shape[-1]
    both = grad.new_empty(*grad.shape[:-1], 2 * width)
    to = (both[..., :width], both[..., width:])
    _write_gradients_fp8(grad, gate, up, to, bounds, 2 * width)
    return both


def _write_gradients_fp8(
    grad: Tensor, gate: Kept, up: Kept, to: tuple[Tensor, Tensor], bounds: Bounds, stride: int
) -> None:
    e4m3_dtype(grad.device)
    dy = rows_of(grad)
    rows, width = dy.shape
    tiles, together = ceil_div(width, TILE), _tiles_a_program(width)
    b1, b2, situ = _situ(bounds)
    launch(
        _backward_fp8, (rows, ceil_div(tiles, together)), dy,
        *(x.contiguous() for x in (*gate, *up)), *to, b1, b2, width,
        tiles, dy.stride(0), stride, SITU=situ, T=together,
    )  # fmt: skip
