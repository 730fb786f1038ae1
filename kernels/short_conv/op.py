"""The short convolution as an op: saves its input and the taps, nothing between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.short_conv import reference


@torch.library.custom_op("flopwright::short_conv", mutates_args=())
def short_conv(x: Tensor, weight: Tensor, head: int, state: Tensor | None = None) -> Tensor:
    """Returns silu of the causal convolution; see `reference.short_conv`."""
    return reference.short_conv(x, weight, state, head)


@short_conv.register_fake
def _(x: Tensor, weight: Tensor, head: int, state: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("flopwright::short_conv_backward", mutates_args=())
def short_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, head: int, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight and of the inputs before x."""
    dx, dw, before = reference.short_conv_backward(grad, x, weight, state, head)
    return dx.contiguous(), dw, before.clone()  # of one sequence both are parts of one tensor


@short_conv_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, head: int, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    before = x.new_empty((x.shape[0], weight.shape[-1] - 1, x.shape[2]))
    return x.new_empty(x.shape), weight.new_empty(weight.shape), before


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ctx.head, state = (*inputs, None)[:4]
    ctx.save_for_backward(x, weight, state)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, state = ctx.saved_tensors
    dx, dw, before = short_conv_backward(grad, x, weight, ctx.head, state)
    return dx, dw, None, None if state is None else before


short_conv.register_autograd(_backward, setup_context=_setup)
