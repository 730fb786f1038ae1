"""Load balancing by gradient: the sequence-wise loss of DeepSeek-V3 (arXiv 2412.19437, 2.1.2).

For a sequence of T tokens, E experts, k choices a token:
L = alpha * sum_i f_i P_i, f_i = E / (k T) * tokens that chose i, P_i = mean over tokens of
s_i / sum_j s_j. A batch counts the mean over its sequences. f has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.router import reference


def choice_fractions(choices: Tensor, num_experts: int, sequences: int) -> Tensor:
    """Returns f [sequences, E] in fp64: 1 for every expert at balanced load.

    Args:
        choices: [T, k] int64 chosen experts, the tokens of a sequence one after another.
    """
    rows = choices.reshape(sequences, -1)
    ones = torch.ones_like(rows, dtype=torch.float64)
    counts = ones.new_zeros(sequences, num_experts).scatter_add_(1, rows, ones)
    return counts * (num_experts / rows.shape[1])


def sequence_balance_loss(scores: Tensor, choices: Tensor, sequences: int) -> Tensor:
    """Returns the loss for alpha = 1, shape (); E-fold smaller P than f make it 1 when balanced.

    Args:
        scores: [T, E] router scores before the bias, differentiable.
        choices: [T, k] int64, the tokens of a sequence one after another.
        sequences: how many sequences the T tokens are.
    """
    fractions = choice_fractions(choices, scores.shape[1], sequences).to(scores.dtype)
    shares = scores / scores.sum(-1, keepdim=True)
    means = shares.reshape(sequences, -1, scores.shape[1]).mean(1)
    return (fractions * means).sum(1).mean()


class BalancedWeights(torch.autograd.Function):
    """The router's weights unchanged; backward adds the loss's gradient to the logits.

    It saves the logits and f, and so needs no loss term at the end of the model, which may
    stand on another pipeline stage.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        logits: Tensor,
        choices: Tensor,
        sequences: int,
        softmax: bool,
        coefficient: float,
        together: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Returns the weights; `coefficient` is alpha times the micro-batch's share of a step."""
        fractions = together(choice_fractions(choices, logits.shape[1], sequences))
        fractions = fractions.to(logits.dtype)
        ctx.save_for_backward(logits, fractions)
        ctx.softmax, ctx.coefficient = softmax, coefficient
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the weights' gradient as it came, and coefficient * dL/dlogits."""
        logits, fractions = ctx.saved_tensors
        scores = reference.score(logits, ctx.softmax)
        total = scores.sum(-1, keepdim=True)
        # L = mean over tokens of f . s / sum(s), f that of the token's sequence.
        pull = fractions.repeat_interleave(logits.shape[0] // fractions.shape[0], 0)
        pull = (pull - (pull * scores).sum(-1, keepdim=True) / total) / total
        if ctx.softmax:
            local = scores * (pull - (pull * scores).sum(-1, keepdim=True))
        else:
            local = pull * scores * (1 - scores)
        return grad, local * (ctx.coefficient / logits.shape[0]), *[None] * 5


def balanced(
    weights: Tensor,
    logits: Tensor,
    choices: Tensor,
    *,
    sequences: int,
    softmax: bool,
    coefficient: float,
    together: Callable[[Tensor], Tensor] = lambda fractions: fractions,
) -> Tensor:
    """Returns the weights [T, k], in whose backward the balance loss pulls on the logits.

    Args:
        together: makes f of whole sequences out of f of the T tokens, where these are a part
            of each sequence.
    """
    out: Tensor = BalancedWeights.apply(  # type: ignore[no-untyped-call]
        weights, logits, choices, sequences, softmax, coefficient, together
    )
    return out
