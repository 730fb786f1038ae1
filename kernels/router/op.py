"""Choice of experts as an op: saves the choices and scores. Plain torch everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.router import reference


@torch.library.custom_op("flopwright::route", mutates_args=())
def route(
    logits: Tensor,
    bias: Tensor | None,
    replay: Tensor | None,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    softmax: bool,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (choices [T, k] int64, weights [T, k], the scores that backward needs).

    Args:
        logits: [T, E], at least fp32.
        bias: [E] selection bias, or None.
        replay: [T, k] choices to take instead of the router's own, or None.
        softmax: scores are a softmax over the experts, otherwise sigmoids.

    The scores returned are those of the chosen experts [T, k]; for a softmax all [T, E].
    """
    scores = reference.score(logits, softmax)
    if replay is None:
        choices = reference.choose(scores, bias, top_k, num_groups, top_k_groups)
    else:
        choices = replay.clone()
    weights = reference.weigh(scores, choices, normalise, scale)
    return choices, weights, scores if softmax else scores.gather(-1, choices)


@route.register_fake
def _(
    logits: Tensor,
    bias: Tensor | None,
    replay: Tensor | None,
    top_k: int,
    num_groups: int,
    top_k_groups: int,
    softmax: bool,
    normalise: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    scores = logits.new_empty(logits.shape if softmax else shape)
    return logits.new_empty(shape, dtype=torch.int64), logits.new_empty(shape), scores


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    choices, _, scores = output
    ctx.num_experts = inputs[0].shape[1]
    ctx.softmax, ctx.normalise, ctx.scale = inputs[6:]
    ctx.save_for_backward(choices, scores)
    ctx.mark_non_differentiable(choices, scores)


def _backward(ctx: Any, _choices: Any, grad: Tensor, _scores: Any) -> tuple[Tensor | None, ...]:
    choices, scores = ctx.saved_tensors
    chosen = scores.gather(-1, choices) if ctx.softmax else scores
    grad = grad * ctx.scale
    if ctx.normalise:  # w = s / sum(s)
        total = chosen.sum(-1, keepdim=True)
        grad = (grad - (grad * chosen).sum(-1, keepdim=True) / total) / total
    shape = (choices.shape[0], ctx.num_experts)
    if ctx.softmax:
        full = grad.new_zeros(shape).scatter_(-1, choices, grad)
        grad_logits = scores * (full - (full * scores).sum(-1, keepdim=True))
    else:
        local = grad * chosen * (1 - chosen)
        grad_logits = grad.new_zeros(shape).scatter_(-1, choices, local)
    return (grad_logits, *[None] * 8)


route.register_autograd(_backward, setup_context=_setup)
