"""Lookup in a part of a table: rows of other parts come out as zeros. Saves the tokens only."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.gradients import weight_gradient


def _inside(tokens: Tensor, first: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens' places in the part (0 for those outside), and which are outside."""
    places = tokens - first
    outside = (places < 0) | (places >= rows)
    return places.masked_fill(outside, 0), outside.unsqueeze(-1)


@torch.library.custom_op("flopwright::embedding_part", mutates_args=())
def embedding_part(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    """Returns [..., H]: row token - first of weight, zeros for tokens that are not in it."""
    places, outside = _inside(tokens, first, weight.shape[0])
    rows = weight.index_select(0, places.reshape(-1)).reshape(*tokens.shape, weight.shape[1])
    return rows.masked_fill_(outside, 0)


@embedding_part.register_fake
def _(tokens: Tensor, weight: Tensor, first: int) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    tokens, weight, ctx.first = inputs
    ctx.save_for_backward(tokens)
    ctx.rows = weight.shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
    (tokens,) = ctx.saved_tensors
    compute = partial(_weight_gradient, first=ctx.first, rows=ctx.rows)
    return None, weight_gradient(ctx, 1, compute, grad, tokens), None


def _weight_gradient(grad: Tensor, tokens: Tensor, first: int, rows: int) -> Tensor:
    places, outside = _inside(tokens, first, rows)
    gradient: Tensor = torch.ops.aten.embedding_dense_backward(
        grad.masked_fill(outside, 0), places, rows, -1, False
    )
    return gradient


embedding_part.register_autograd(_backward, setup_context=_setup)
