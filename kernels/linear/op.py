"""Linear layer as an op: saves its input (and the weight), nothing else.

CPU and CUDA both run the library's matrix product.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.gradients import weight_gradient
from flopwright.kernels.linear import reference


@torch.library.custom_op("flopwright::linear", mutates_args=())
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """Returns x @ weight^T (+ bias); see `reference.linear`."""
    return reference.linear(x, weight, bias, wide)


@linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    dtype = reference.wide_dtype(x.dtype) if wide else x.dtype
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, wide = inputs
    ctx.save_for_backward(x, weight)
    ctx.wide, ctx.bias_dtype = wide, None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    # Arguments left at their defaults have no entry.
    need_x, need_weight, need_bias = (*ctx.needs_input_grad, False)[:3]
    rows = grad.reshape(-1, grad.shape[-1])
    grad_x = grad_weight = grad_bias = None
    if need_x:
        grad_x = (rows @ weight.to(rows.dtype)).to(x.dtype).reshape(x.shape)
    if need_weight:
        compute = partial(_weight_gradient, dtype=weight.dtype)
        grad_weight = weight_gradient(ctx, 1, compute, rows, x)
    if need_bias:
        grad_bias = weight_gradient(ctx, 2, partial(_bias_gradient, dtype=ctx.bias_dtype), rows)
    return grad_x, grad_weight, grad_bias, None


def _bias_gradient(rows: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.sum(0).to(dtype)


def _weight_gradient(rows: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    return (rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype)).to(dtype)


linear.register_autograd(_backward, setup_context=_setup)
