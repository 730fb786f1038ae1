"""Each row plus the bias of its expert, as an op: saves the rows' counts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _experts(counts: Tensor, rows: int) -> Tensor:
    """Returns the expert of each row, of rows grouped by expert."""
    return torch.repeat_interleave(counts, output_size=rows)


@torch.library.custom_op("flopwright::expert_bias", mutates_args=())
def expert_bias(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Returns rows [N, W], grouped by expert, plus bias [E, W]; counts: [E] rows of each."""
    return rows + bias.index_select(0, _experts(counts, rows.shape[0]))


@expert_bias.register_fake
def _(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty(rows.shape)


@torch.library.custom_op("flopwright::expert_bias_backward", mutates_args=())
def expert_bias_backward(grad: Tensor, counts: Tensor) -> Tensor:
    """Returns the gradient of the biases [E, W]."""
    out = grad.new_zeros((counts.shape[0], grad.shape[1]))
    return out.index_add_(0, _experts(counts, grad.shape[0]), grad)


@expert_bias_backward.register_fake
def _(grad: Tensor, counts: Tensor) -> Tensor:
    return grad.new_empty((counts.shape[0], grad.shape[1]))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    (counts,) = ctx.saved_tensors
    return grad, expert_bias_backward(grad, counts), None


expert_bias.register_autograd(_backward, setup_context=_setup)
