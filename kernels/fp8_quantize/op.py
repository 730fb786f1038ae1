"""Narrowing to FP8 and back as ops, outside of autograd. Plain torch everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.fp8_quantize import reference


@torch.library.custom_op("flopwright::fp8_quantize", mutates_args=())
def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (numbers, scales); see `reference.quantize`."""
    numbers, scales = reference.quantize(x)
    return numbers.contiguous(), scales


@quantize.register_fake
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = x.new_empty((*x.shape[:-1], reference.tiles(x.shape[-1])), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scales


@torch.library.custom_op("flopwright::fp8_dequantize", mutates_args=())
def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers in `dtype`; see `reference.dequantize`."""
    return reference.dequantize(numbers, scales, dtype)


@dequantize.register_fake
def _(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return numbers.new_empty(numbers.shape, dtype=dtype)
