"""The loss of draft heads as an op: saves both sides and six numbers a token, never logits.

The goal is frozen and gets no gradient. Both gradients of the draft are made together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.launch import unit_columns
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.linear_cross_entropy import reference as head
from flopwright.kernels.lk_loss import reference


@torch.library.custom_op("flopwright::linear_lk_loss", mutates_args=())
def linear_lk_loss(
    x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (mean loss in nats, [6, N] that backward needs); see `reference.lk_loss`.

    The second has the log-sum-exps of draft and goal in two parts each, the logarithm of the
    overlap, and the share of it where q < p. Of no tokens the mean is NaN, as torch's.

    Args:
        x: [N, H], hidden states of the draft; weight: [V, H], its head.
        y: [N, G], those of the goal; goal_weight: [V, G].
    """
    sides = [(unit_columns(x), unit_columns(weight)), (unit_columns(y), unit_columns(goal_weight))]
    none = torch.full((x.shape[0],), -1, dtype=torch.int64, device=x.device)
    statistics, overlap = head.statistics, reference.overlap
    if runs_triton("lk_loss", x):
        import flopwright.kernels.linear_cross_entropy.kernel as head_kernel
        import flopwright.kernels.lk_loss.kernel as kernel

        statistics, overlap = head_kernel.statistics, kernel.overlap
    lse = [statistics(s, w, none)[0] for s, w in sides]
    found = overlap((*sides[0], lse[0]), (*sides[1], lse[1]))
    return -found[0].mean(), torch.cat((*lse, torch.stack(found)))


@linear_lk_loss.register_fake
def _(x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(x.dtype)
    return x.new_empty((), dtype=dtype), x.new_empty((6, x.shape[0]), dtype=dtype)


@torch.library.custom_op("flopwright::linear_lk_loss_backward", mutates_args=())
def linear_lk_loss_backward(
    grad: Tensor, x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the draft's hidden states and head."""
    kept = kept.contiguous()
    draft = unit_columns(x), unit_columns(weight), kept[:2]
    goal = unit_columns(y), unit_columns(goal_weight), kept[2:4]
    shared, below = kept[4], kept[5]
    part = reference.gradient_part
    if runs_triton("lk_loss", x):
        import flopwright.kernels.lk_loss.kernel as kernel

        part = kernel.gradient_part
    grad_x = x.new_zeros(x.shape, dtype=wide_dtype(x.dtype))
    grad_weight = weight.new_empty(weight.shape)
    for first, end in head.parts(weight.shape[0]):
        d = part(draft, goal, shared, below, grad, first, end)
        head.product(d, weight[first:end], grad_x)
        torch.mm(d.t(), x, out=grad_weight[first:end])
        del d  # before the next part stands
    return grad_x.to(x.dtype), grad_weight


@linear_lk_loss_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(
    ctx: Any, grad: Tensor, _grad_kept: Tensor | None
) -> tuple[Tensor, Tensor, None, None]:
    return (*linear_lk_loss_backward(grad, *ctx.saved_tensors), None, None)


linear_lk_loss.register_autograd(_backward, setup_context=_setup)
