"""RMSNorm as an op, alone or behind a residual sum.

It saves its input (the sum), the weight and one number a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels import libraries
from flopwright.kernels.dispatch import kernel_for, runs_triton
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.rms_norm import reference


@torch.library.custom_op("flopwright::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (normalised x, reciprocal root mean square); see `reference.rms_norm`."""
    chosen = kernel_for("rms_norm", x)
    if chosen == "library":
        return libraries.rms_norm(x, weight, eps)
    if chosen == "triton":
        import flopwright.kernels.rms_norm.kernel as kernel

        return kernel.forward(x, weight, eps)[:2]
    return reference.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


@torch.library.custom_op("flopwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of weight."""
    chosen = kernel_for("rms_norm", x)
    if chosen == "library":
        return libraries.rms_norm_backward(grad, x, weight, rstd)
    if chosen == "triton":
        import flopwright.kernels.rms_norm.kernel as kernel

        return kernel.backward(grad, x, weight, rstd)
    return reference.rms_norm_backward(grad, x, weight, rstd)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_rstd: Tensor | None) -> tuple[Tensor, Tensor, None]:
    grad_x, grad_weight = rms_norm_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, None


rms_norm.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("flopwright::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if runs_triton("add_rms_norm", x):
        import flopwright.kernels.rms_norm.kernel as kernel

        y, rstd, total = kernel.forward(x, weight, eps, residual)
    else:
        total = x + residual
        y, rstd = reference.rms_norm(total, weight, eps)
    return y, total, rstd


@_add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rstd = x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))
    return x.new_empty(x.shape), x.new_empty(x.shape), rstd


@torch.library.custom_op("flopwright::add_rms_norm_backward", mutates_args=())
def add_rms_norm_backward(
    grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the sum's two terms, which are one, and of weight."""
    if runs_triton("add_rms_norm", total):
        import flopwright.kernels.rms_norm.kernel as kernel

        return kernel.backward(grad, total, weight, rstd, grad_sum)
    grad_total, grad_weight = reference.rms_norm_backward(grad, total, weight, rstd)
    return grad_total + grad_sum, grad_weight


@add_rms_norm_backward.register_fake
def _(
    grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return total.new_empty(total.shape), weight.new_empty(weight.shape)


def _setup_sum(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])


def _backward_sum(
    ctx: Any, grad: Tensor, grad_sum: Tensor, _grad_rstd: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None]:
    both, grad_weight = add_rms_norm_backward(grad, grad_sum, *ctx.saved_tensors)
    return both, both, grad_weight, None


_add_rms_norm.register_autograd(_backward_sum, setup_context=_setup_sum)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (the norm of x + residual, x + residual): one pass in place of two."""
    y, total, _ = _add_rms_norm(x, residual, weight, eps)
    return y, total
