"""Sorting rows by expert and back as ops: gathers both ways, so that sums are deterministic.

`permute` saves indices only; `unpermute` also its rows and weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.moe_permute import reference


@torch.library.custom_op("flopwright::sort_by_expert", mutates_args=())
def sort_by_expert(choices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (order, place, counts); see the reference. No gradient passes."""
    return reference.sort_by_expert(choices, num_experts)


@sort_by_expert.register_fake
def _(choices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    n = choices.numel()
    return choices.new_empty(n), choices.new_empty(n), choices.new_empty(num_experts)


def _sum_choices(rows: Tensor, place: Tensor, top_k: int) -> Tensor:
    if runs_triton("moe_permute", rows):
        import flopwright.kernels.moe_permute.kernel as kernel

        return kernel.sum_choices(rows, None, place, top_k)
    return rows.index_select(0, place).reshape(-1, top_k, rows.shape[-1]).sum(1)


@torch.library.custom_op("flopwright::permute", mutates_args=())
def permute(x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
    """Returns the tokens' rows [N, H] in expert order."""
    if runs_triton("moe_permute", x):
        import flopwright.kernels.moe_permute.kernel as kernel

        return kernel.permute(x, order, top_k)
    return x.index_select(0, order // top_k)


@permute.register_fake
def _(x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
    return x.new_empty((order.shape[0], x.shape[1]))


def _setup_permute(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])
    ctx.top_k = inputs[3]


@torch.library.custom_op("flopwright::permute_backward", mutates_args=())
def permute_backward(grad: Tensor, place: Tensor, top_k: int) -> Tensor:
    """Returns the gradient of x [T, H]: the sum over each token's rows."""
    return _sum_choices(grad, place, top_k)


@permute_backward.register_fake
def _(grad: Tensor, place: Tensor, top_k: int) -> Tensor:
    return grad.new_empty((place.shape[0] // top_k, grad.shape[1]))


def _backward_permute(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    (place,) = ctx.saved_tensors
    # In plain torch what stands for a moment stands in sight of whoever counts memory.
    back = permute_backward if runs_triton("moe_permute", grad) else _sum_choices
    return back(grad, place, ctx.top_k), None, None, None


permute.register_autograd(_backward_permute, setup_context=_setup_permute)


@torch.library.custom_op("flopwright::unpermute", mutates_args=())
def unpermute(rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
    """Returns for each token the weighted sum [T, H] of its k rows."""
    tokens, top_k = weights.shape
    if runs_triton("moe_permute", rows):
        import flopwright.kernels.moe_permute.kernel as kernel

        return kernel.sum_choices(rows, weights, place, top_k)
    chosen = rows.index_select(0, place).reshape(tokens, top_k, -1)
    return chosen.mul_(weights.unsqueeze(-1).to(rows.dtype)).sum(1)


@unpermute.register_fake
def _(rows: Tensor, weights: Tensor, order: Tensor, place: Tensor) -> Tensor:
    return rows.new_empty((weights.shape[0], rows.shape[1]))


def _setup_unpermute(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    top_k = weights.shape[1]
    spread = grad.index_select(0, order // top_k)
    # The weight's gradient first, in expert order, so that no second copy of the rows is made.
    dots = (spread * rows).sum(-1, dtype=weights.dtype)
    grad_weights = dots.index_select(0, place).reshape(weights.shape)
    sorted_weights = weights.reshape(-1).index_select(0, order).to(rows.dtype)
    return spread.mul_(sorted_weights.unsqueeze(-1)), grad_weights


@torch.library.custom_op("flopwright::unpermute_backward", mutates_args=())
def unpermute_backward(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of rows [N, H] and weights [T, k]."""
    if runs_triton("moe_permute", rows):
        import flopwright.kernels.moe_permute.kernel as kernel

        return kernel.unpermute_gradients(grad, rows, weights, order)
    return _gradients(grad, rows, weights, order, place)


@unpermute_backward.register_fake
def _(
    grad: Tensor, rows: Tensor, weights: Tensor, order: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _backward_unpermute(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    back = unpermute_backward if runs_triton("moe_permute", grad) else _gradients
    return (*back(grad, *ctx.saved_tensors), None, None)


unpermute.register_autograd(_backward_unpermute, setup_context=_setup_unpermute)
