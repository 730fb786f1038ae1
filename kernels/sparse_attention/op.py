"""Sparse attention as ops. Plain torch everywhere: there is no kernel of its own yet.

`selected_attention` saves queries, keys, the choice, its result and the log-sum-exps;
`index_loss` the three gradients it makes on its way; `select_keys` has no gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.gradients import weight_gradient
from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.sparse_attention import reference


@torch.library.custom_op("flopwright::select_keys", mutates_args=())
def select_keys(q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
    """Returns the positions that an indexer chooses [B, S, K] int32; see the reference."""
    return reference.select_keys(q, k, weights, top_k)


@select_keys.register_fake
def _(q: Tensor, k: Tensor, weights: Tensor, top_k: int) -> Tensor:
    return q.new_empty((*q.shape[:2], min(top_k, k.shape[1])), dtype=torch.int32)


@torch.library.custom_op("flopwright::selected_attention", mutates_args=())
def selected_attention(
    q: Tensor, keys: Tensor, indices: Tensor, v_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (output [B, S, H, V], log-sum-exp [B, H, S]); see the reference."""
    return reference.selected_attention(q, keys, indices, v_width, scale)


@selected_attention.register_fake
def _(
    q: Tensor, keys: Tensor, indices: Tensor, v_width: int, scale: float
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    lse = q.new_empty((batch, heads, queries), dtype=wide_dtype(q.dtype))
    return q.new_empty((batch, queries, heads, v_width)), lse


@torch.library.custom_op("flopwright::selected_attention_backward", mutates_args=())
def selected_attention_backward(
    grad: Tensor, q: Tensor, keys: Tensor, indices: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of queries and keys."""
    return reference.selected_attention_backward(grad, q, keys, indices, out, lse, scale)


@selected_attention_backward.register_fake
def _(
    grad: Tensor, q: Tensor, keys: Tensor, indices: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), keys.new_empty(keys.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, keys, indices, _, ctx.scale = inputs
    ctx.save_for_backward(q, keys, indices, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*selected_attention_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None)


selected_attention.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("flopwright::index_loss", mutates_args=())
def index_loss(
    index_q: Tensor, index_k: Tensor, weights: Tensor, q: Tensor, keys: Tensor, lse: Tensor,
    indices: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns (loss, gradients of the indexer's queries, keys and weights); see the reference.

    The gradients are made with the loss. Nothing reaches what attention is made of.
    """
    return reference.index_loss(index_q, index_k, weights, q, keys, lse, indices, scale)


@index_loss.register_fake
def _(
    index_q: Tensor, index_k: Tensor, weights: Tensor, q: Tensor, keys: Tensor, lse: Tensor,
    indices: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    empty = [t.new_empty(t.shape) for t in (index_q, index_k, weights)]
    return lse.new_empty(()), empty[0], empty[1], empty[2]


def _setup_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward_loss(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    return (*(t * grad.to(t.dtype) for t in ctx.saved_tensors), *[None] * 5)


index_loss.register_autograd(_backward_loss, setup_context=_setup_loss)


@torch.library.custom_op("flopwright::head_linear", mutates_args=())
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x @ weight^T head by head [B, S, H, out]; see the reference."""
    return reference.head_linear(x, weight).contiguous()


@head_linear.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:3], weight.shape[1]))


def _setup_heads(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_heads(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = head_linear(grad, weight.transpose(1, 2))
    if ctx.needs_input_grad[1]:
        compute = partial(_weight_gradient, dtype=weight.dtype)
        grad_weight = weight_gradient(ctx, 1, compute, grad, x)
    return grad_x, grad_weight


def _weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    rows, inputs = (t.flatten(0, 1).permute(1, 2, 0) for t in (grad, x))
    return (rows @ inputs.transpose(1, 2)).to(dtype)


head_linear.register_autograd(_backward_heads, setup_context=_setup_heads)


class _Pulled(torch.autograd.Function):
    """A tensor unchanged, in whose backward a loss pulls as well."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.weight, ctx.like = weight, (loss.dtype, loss.device)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device = ctx.like
        return grad, torch.full((), ctx.weight, dtype=dtype, device=device), None


def pulled(out: Tensor, loss: Tensor, weight: float) -> Tensor:
    """Returns `out`, whose backward sends `weight` as the gradient of `loss`, whatever its own is.

    A loss in the middle of a model needs no term at its end, which may stand on another rank.
    """
    result: Tensor = _Pulled.apply(out, loss, weight)  # type: ignore[no-untyped-call]
    return result
