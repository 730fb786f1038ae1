"""LayerNorm as an op: saves its input, the weight and two numbers a row.

Torch's own kernel everywhere, in fp32 or wider.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


@torch.library.custom_op("flopwright::layer_norm", mutates_args=())
def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (normalised x, mean, reciprocal deviation); see `reference.layer_norm`."""
    wide = wide_dtype(x.dtype)
    y, mean, rstd = torch.native_layer_norm(
        x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps
    )
    return y.to(x.dtype), mean, rstd


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    rows, wide = (*x.shape[:-1], 1), wide_dtype(x.dtype)
    return x.new_empty(x.shape), x.new_empty(rows, dtype=wide), x.new_empty(rows, dtype=wide)


@torch.library.custom_op("flopwright::layer_norm_backward", mutates_args=())
def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight and bias."""
    wide, scale = rstd.dtype, weight.to(rstd.dtype)
    # The bias itself is not needed for its gradient, only a tensor of its shape.
    grads = torch.ops.aten.native_layer_norm_backward(
        grad.to(wide).contiguous(), x.to(wide), x.shape[-1:], mean, rstd, scale, scale,
        [True, True, True],
    )  # fmt: skip
    return grads[0].to(x.dtype), grads[1].to(weight.dtype), grads[2].to(weight.dtype)


@layer_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    empty = weight.new_empty(weight.shape)
    return x.new_empty(x.shape), empty, torch.empty_like(empty)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(
    ctx: Any, grad: Tensor, _mean: Tensor | None, _rstd: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*layer_norm_backward(grad, *ctx.saved_tensors), None)


layer_norm.register_autograd(_backward, setup_context=_setup)
