"""Causal attention with a sink a head: one more logit in the softmax, with no value behind it.

With lse the log-sum-exp of a row without the sink s: lse' = log(e^lse + e^s), and the result is
that without the sink times e^(lse - lse'). The gradients of q, k and v are those of attention
at (result, lse'); that of s is -sum of e^(s - lse') (grad . result).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.attention.op import attention, attention_backward


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (result, log-sum-exp) of rows with the sinks among them.

    Args:
        out: [B, S, H, V]; lse: [B, H, S]; sinks: [H].
    """
    together = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    share = torch.exp(lse - together).transpose(1, 2).unsqueeze(-1)
    return (out * share).to(out.dtype), together


@torch.library.custom_op("flopwright::attention_with_sinks", mutates_args=())
def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns (output [B, S, H, V], log-sum-exp [B, H, S]), the sinks [H] among the logits."""
    out, lse = attention(q, k, v, scale, window)
    return with_sinks(out, lse, sinks)


@attention_with_sinks.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = attention(q, k, v, scale, window)
    return found


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = (*inputs, 0)[:6]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, out, lse = ctx.saved_tensors
    of_inputs = attention_backward(grad, q, k, v, out, lse, ctx.scale, ctx.window)
    along = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1).transpose(1, 2)
    shares = torch.exp(sinks.to(lse.dtype).view(1, -1, 1) - lse)
    return (*of_inputs, -(shares * along).sum((0, 2)).to(sinks.dtype), None, None)


attention_with_sinks.register_autograd(_backward, setup_context=_setup)
