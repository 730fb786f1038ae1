"""Head and cross-entropy as an op: saves hidden states, weight, targets and two numbers a token.

The backward pass makes the logits again, a sixteenth of the vocabulary at a time; that part
of their gradient is all that ever stands in memory. Both gradients are made together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.linear_cross_entropy import reference


def _unit_columns(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("flopwright::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (mean nats a token, log-sum-exp in two parts [2, N]); see the reference.

    Args:
        x: [N, hidden]; weight: [vocabulary, hidden]; targets: [N] int64.
    """
    if runs_triton("linear_cross_entropy", x):
        import flopwright.kernels.linear_cross_entropy.kernel as kernel

        lse, chosen = kernel.statistics(_unit_columns(x), _unit_columns(weight), targets)
    else:
        lse, chosen = reference.statistics(x, weight, targets)
    return ((lse[0] - chosen) + lse[1]).mean(), lse


@linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(x.dtype)
    return x.new_empty((), dtype=dtype), x.new_empty((2, x.shape[0]), dtype=dtype)


@torch.library.custom_op("flopwright::linear_cross_entropy_backward", mutates_args=())
def linear_cross_entropy_backward(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and weight."""
    part = reference.gradient_part
    if runs_triton("linear_cross_entropy", x):
        import flopwright.kernels.linear_cross_entropy.kernel as kernel

        part, x, weight = kernel.gradient_part, _unit_columns(x), _unit_columns(weight)
    grad_x = x.new_zeros(x.shape, dtype=wide_dtype(x.dtype))
    grad_weight = weight.new_empty(weight.shape)
    for first, end in reference.parts(weight.shape[0]):
        d = part(x, weight, targets, lse, grad, first, end)
        reference.product(d, weight[first:end], grad_x)
        torch.mm(d.t(), x, out=grad_weight[first:end])
    return grad_x.to(x.dtype), grad_weight


@linear_cross_entropy_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor, Tensor, None]:
    return (*linear_cross_entropy_backward(grad, *ctx.saved_tensors), None)


linear_cross_entropy.register_autograd(_backward, setup_context=_setup)
