"""Cross-entropy in which tokens count by weights: masks of the loss, SFT and RL.

Plain torch everywhere, as `op.py`; it saves what that saves, and the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


@torch.library.custom_op("flopwright::weighted_cross_entropy", mutates_args=())
def weighted_cross_entropy(
    logits: Tensor, targets: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns (the mean over rows of weight * negative log-likelihood, log-sum-exp [N]).

    Args:
        logits: [N, vocabulary]; targets: [N] int64; weights: [N], whose mean over all that a
            step's mean is taken over is 1.
    """
    wide = logits.to(wide_dtype(logits.dtype))
    lse = torch.logsumexp(wide, -1)
    chosen = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return ((lse - chosen) * weights.to(lse.dtype)).mean(), lse


@weighted_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty(logits.shape[:1], dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor, None, None]:
    logits, targets, weights, lse = ctx.saved_tensors
    # In place on one buffer: this gradient is the largest tensor of the head.
    p = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp_()
    p.scatter_add_(-1, targets.unsqueeze(-1), p.new_full((targets.shape[0], 1), -1.0))
    each = weights.to(lse.dtype).unsqueeze(-1) * (grad / logits.shape[0])
    return p.mul_(each).to(logits.dtype), None, None


weighted_cross_entropy.register_autograd(_backward, setup_context=_setup)
