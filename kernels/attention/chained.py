"""Attention of drafts: over a context, and over what was drafted before at the same place.

Step j of an unrolled draft has a query at every place i. It sees the keys of the first step at
places up to i, which are made of the frozen model's features, and of the later steps those at
place i alone: its own chain. With lse the log-sum-exp over the context and s_n the scores of the
chain, the softmax over both has lse' = log(e^lse + sum e^s_n); the context's gradients are those
of attention at (result, lse'), as with sinks.

B batch, S places, H heads, G key heads, D width, V value width, N links of the chain.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.attention.op import attention, attention_backward


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Returns [N, B, S, G, D] with each key head as often as it has queries."""
    return x.repeat_interleave(heads // x.shape[3], 3)


def _links(q: Tensor, keys: Tensor, scale: float, like: Tensor) -> Tensor:
    """Returns the scores of the chain [N, B, S, H], at least fp32."""
    wide = like.dtype
    return (q.to(wide) * _repeated(keys, q.shape[2]).to(wide)).sum(-1) * scale


@torch.library.custom_op("flopwright::chained_attention", mutates_args=())
def chained_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns (output [B, S, H, V], log-sum-exp [B, H, S] over context and chain).

    Args:
        q: [B, S, H, D]; k: [B, S, G, D]; v: [B, S, G, V], of the context.
        keys: [N, B, S, G, D]; values: [N, B, S, G, V], of the chain, this step's last.
    """
    out, lse = attention(q, k, v, scale, 0)
    links = _links(q, keys, scale, lse)
    context = lse.transpose(1, 2)
    total = torch.logsumexp(torch.cat((context.unsqueeze(0), links)), 0)
    share = (links - total).exp().unsqueeze(-1)
    mixed = (share * _repeated(values, q.shape[2]).to(lse.dtype)).sum(0)
    mixed += (context - total).exp().unsqueeze(-1) * out.to(lse.dtype)
    return mixed.to(q.dtype), total.transpose(1, 2).contiguous()


@chained_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = attention(q, k, v, scale, 0)
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, keys, values, out, lse = ctx.saved_tensors
    grad_q, grad_k, grad_v = attention_backward(grad, q, k, v, out, lse, ctx.scale, 0)
    wide, heads = lse.dtype, q.shape[2]
    along = (grad.to(wide) * out.to(wide)).sum(-1)
    share = (_links(q, keys, ctx.scale, lse) - lse.transpose(1, 2)).exp()
    inner = (grad.to(wide) * _repeated(values, heads).to(wide)).sum(-1)
    pull = (share * (inner - along) * ctx.scale).unsqueeze(-1)
    grad_q = (grad_q.to(wide) + (pull * _repeated(keys, heads).to(wide)).sum(0)).to(q.dtype)
    of_keys, of_values = pull * q.to(wide), share.unsqueeze(-1) * grad.to(wide)
    return (
        grad_q, grad_k, grad_v, _by_group(of_keys, keys), _by_group(of_values, values), None
    )  # fmt: skip


def _by_group(grad: Tensor, like: Tensor) -> Tensor:
    """Returns gradients by head summed over the queries of each key head."""
    groups = grad.view(*grad.shape[:3], like.shape[3], -1, grad.shape[-1])
    return groups.sum(4).to(like.dtype)


chained_attention.register_autograd(_backward, setup_context=_setup)
