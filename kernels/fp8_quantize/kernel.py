"""Narrowing to E4M3 and back as Triton kernels: tiles of 1 x 128, and blocks of 128 x 128.

Scales and numbers are divided with IEEE rounding, so that they are those of the reference.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast, e4m3_scale, largest_of, to_e4m3, within
from flopwright.kernels.launch import ceil_div, e4m3_dtype, launch, power_of_2, rows_of

TILE: Final = 128
_MOST: Final = 32  # tiles a program handles


@triton.jit
def _quantize(
    x_ptr, codes_ptr, scales_ptr, width, tiles, x_stride, LARGEST: tl.constexpr, T: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * T + tl.arange(0, T)
    column = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = e4m3_scale(largest_of(x), LARGEST)
    scaled = within(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)), LARGEST)
    codes = to_e4m3(scaled, codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + row * width + column, codes, mask=inside)
    tl.store(scales_ptr + row * tiles + tile, scale, mask=tile < tiles)


@triton.jit
def _dequantize(codes_ptr, scales_ptr, y_ptr, width, tiles, T: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * T + tl.arange(0, T)
    column = tile[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    scale = tl.load(scales_ptr + row * tiles + tile, mask=tile < tiles, other=0.0)
    codes = tl.load(codes_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
    y = cast(codes * scale[:, None], y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + column, y, mask=inside)


@triton.jit
def _quantize_blocks(x_ptr, codes_ptr, scales_ptr, rows, width, x_stride, LARGEST: tl.constexpr):
    row = tl.program_id(0) * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None]
    x = tl.load(x_ptr + place * x_stride + column[None, :], mask=inside, other=0.0)
    x = x.to(tl.float32)
    of_rows = largest_of(x)
    lost = tl.max((of_rows != of_rows).to(tl.int32), 0) > 0
    scale = e4m3_scale(tl.where(lost, float("nan"), tl.max(of_rows, 0)), LARGEST)
    scaled = within(tl.div_rn(x, tl.full(x.shape, 1.0, tl.float32) * scale), LARGEST)
    codes = to_e4m3(scaled, codes_ptr.dtype.element_ty)
    tl.store(codes_ptr + place * width + column[None, :], codes, mask=inside)
    tl.store(scales_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)


@triton.jit
def _dequantize_blocks(codes_ptr, scales_ptr, y_ptr, rows, width):
    row = tl.program_id(0) * 128 + tl.arange(0, 128)
    column = tl.program_id(1) * 128 + tl.arange(0, 128)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    scale = tl.load(scales_ptr + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1))
    codes = tl.load(codes_ptr + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + place, cast(codes * scale, y_ptr.dtype.element_ty), mask=inside)


def _together(tiles: int) -> int:
    return min(_MOST, power_of_2(tiles))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (numbers, scales); see `reference.quantize`."""
    dtype, flat = e4m3_dtype(x.device), rows_of(x)
    rows, width = flat.shape
    tiles = ceil_div(width, TILE)
    codes = x.new_empty(x.shape, dtype=dtype)
    scales = x.new_empty((*x.shape[:-1], tiles), dtype=torch.float32)
    t = _together(tiles)
    launch(
        _quantize, (rows, ceil_div(tiles, t)), flat, codes, scales, width, tiles, flat.stride(0),
        LARGEST=float(torch.finfo(dtype).max), T=t,
    )  # fmt: skip
    return codes, scales


def dequantize(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers in `dtype`; see `reference.dequantize`."""
    e4m3_dtype(codes.device)
    codes = codes.contiguous()
    y = codes.new_empty(codes.shape, dtype=dtype)
    width = codes.shape[-1]
    rows, tiles = codes.numel() // max(width, 1), scales.shape[-1]
    t = _together(tiles)
    launch(
        _dequantize, (rows, ceil_div(tiles, t)), codes, scales.contiguous(), y, width, tiles, T=t
    )
    return y


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (numbers, scales a block); see `reference.quantize_blocks`."""
    dtype, flat = e4m3_dtype(x.device), rows_of(x)
    rows, width = flat.shape
    grid = ceil_div(rows, TILE), ceil_div(width, TILE)
    codes = x.new_empty(x.shape, dtype=dtype)
    scales = x.new_empty(grid, dtype=torch.float32)
    launch(
        _quantize_blocks, grid, flat, codes, scales, rows, width, flat.stride(0),
        LARGEST=float(torch.finfo(dtype).max), num_warps=8,
    )  # fmt: skip
    return codes, scales


def dequantize_blocks(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers in `dtype`; see `reference.dequantize_blocks`."""
    e4m3_dtype(codes.device)
    rows, width = codes.shape
    y = codes.new_empty(codes.shape, dtype=dtype)
    launch(
        _dequantize_blocks, tuple(scales.shape), codes.contiguous(), scales.contiguous(), y, rows,
        width, num_warps=8,
    )  # fmt: skip
    return y
