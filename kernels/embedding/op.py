"""Embedding lookup as an op: saves the tokens only."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.gradients import weight_gradient


@torch.library.custom_op("flopwright::embedding", mutates_args=())
def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Returns the rows of weight [vocabulary, H] named by tokens [...]: [..., H]."""
    return weight.index_select(0, tokens.reshape(-1)).reshape(*tokens.shape, weight.shape[1])


@embedding.register_fake
def _(tokens: Tensor, weight: Tensor) -> Tensor:
    return weight.new_empty((*tokens.shape, weight.shape[1]))


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.vocab = inputs[1].shape[0]


def _backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None]:
    (tokens,) = ctx.saved_tensors
    compute = partial(_weight_gradient, vocab=ctx.vocab)
    return None, weight_gradient(ctx, 1, compute, grad, tokens)


def _weight_gradient(grad: Tensor, tokens: Tensor, vocab: int) -> Tensor:
    out: Tensor = torch.ops.aten.embedding_dense_backward(grad, tokens, vocab, -1, False)
    return out


embedding.register_autograd(_backward, setup_context=_setup)
