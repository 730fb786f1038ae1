"""Narrowing to FP8 and back as ops, outside of autograd.

Cards that convert to OCP's E4M3 run the Triton kernel, all others plain torch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_e4m3
from flopwright.kernels.fp8_quantize import reference


@torch.library.custom_op("flopwright::fp8_quantize", mutates_args=())
def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (numbers, scales); see `reference.quantize`."""
    if runs_e4m3("fp8_quantize", x):
        import flopwright.kernels.fp8_quantize.kernel as kernel

        return kernel.quantize(x)
    numbers, scales = reference.quantize(x)
    return numbers.contiguous(), scales


@quantize.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((*x.shape[:-1], reference.tiles(x.shape[-1])), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


@torch.library.custom_op("flopwright::fp8_dequantize", mutates_args=())
def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers in `dtype`; see `reference.dequantize`."""
    if dtype != torch.float64 and runs_e4m3("fp8_quantize", numbers):
        import flopwright.kernels.fp8_quantize.kernel as kernel

        return kernel.dequantize(numbers, scales, dtype)
    return reference.dequantize(numbers, scales, dtype)


@dequantize.register_fake
def _(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.new_empty(numbers.shape, dtype=dtype)


@torch.library.custom_op("flopwright::fp8_quantize_blocks", mutates_args=())
def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (numbers, scales a block of 128 x 128); see `reference.quantize_blocks`."""
    if runs_e4m3("fp8_quantize", x):
        import flopwright.kernels.fp8_quantize.kernel as kernel

        return kernel.quantize_blocks(x)
    numbers, scales = reference.quantize_blocks(x)
    return numbers.contiguous(), scales


@quantize_blocks.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks = tuple(reference.tiles(side) for side in x.shape)
    numbers = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return numbers, x.new_empty(blocks, dtype=torch.float32)


@torch.library.custom_op("flopwright::fp8_dequantize_blocks", mutates_args=())
def dequantize_blocks(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers in `dtype`; see `reference.dequantize_blocks`."""
    if dtype != torch.float64 and runs_e4m3("fp8_quantize", numbers):
        import flopwright.kernels.fp8_quantize.kernel as kernel

        return kernel.dequantize_blocks(numbers, scales, dtype)
    return reference.dequantize_blocks(numbers, scales, dtype)


@dequantize_blocks.register_fake
def _(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.new_empty(numbers.shape, dtype=dtype)
