"""A mixture over depth as an op: saves its sources, which stand anyway, and the two vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.attn_res import reference


@torch.library.custom_op("flopwright::attn_res", mutates_args=())
def attn_res(sources: list[Tensor], query: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns the mixture of the sources; see `reference.attn_res`."""
    return reference.attn_res(sources, query, weight, eps)


@attn_res.register_fake
def _(sources: list[Tensor], query: Tensor, weight: Tensor, eps: float) -> Tensor:
    return sources[0].new_empty(sources[0].shape)


@torch.library.custom_op("flopwright::attn_res_backward", mutates_args=())
def attn_res_backward(
    grad: Tensor, sources: list[Tensor], query: Tensor, weight: Tensor, eps: float
) -> list[Tensor]:
    """Returns the gradients of the sources, then those of query and weight."""
    found, d_query, d_weight = reference.attn_res_backward(grad, sources, query, weight, eps)
    return [*found, d_query, d_weight]


@attn_res_backward.register_fake
def _(
    grad: Tensor, sources: list[Tensor], query: Tensor, weight: Tensor, eps: float
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*sources, query, weight)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    sources, query, weight, ctx.eps = inputs
    ctx.save_for_backward(*sources, query, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[list[Tensor], Tensor, Tensor, None]:
    *sources, query, weight = ctx.saved_tensors
    *found, d_query, d_weight = attn_res_backward(grad, sources, query, weight, ctx.eps)
    return found, d_query, d_weight, None


attn_res.register_autograd(_backward, setup_context=_setup)
