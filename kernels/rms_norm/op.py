"""RMSNorm as an op: saves its input, the weight and one number a row.

CUDA tensors go to the Triton kernel, all others to plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.rms_norm import reference


def _triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


@torch.library.custom_op("flopwright::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (normalised x, reciprocal root mean square); see `reference.rms_norm`."""
    if _triton(x):
        import flopwright.kernels.rms_norm.kernel as kernel

        return kernel.forward(x, weight, eps)
    return reference.rms_norm(x, weight, eps)


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


@torch.library.custom_op("flopwright::rms_norm_backward", mutates_args=())
def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of weight."""
    if _triton(x):
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
