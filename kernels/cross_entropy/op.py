"""Cross-entropy as an op: saves logits, targets and one number a row. Plain torch everywhere."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.cross_entropy import reference
from flopwright.kernels.linear.reference import wide_dtype


@torch.library.custom_op("flopwright::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (mean loss in nats, log-sum-exp [N]); see `reference.cross_entropy`."""
    return reference.cross_entropy(logits, targets)


@cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    dtype = wide_dtype(logits.dtype)
    return logits.new_empty((), dtype=dtype), logits.new_empty(logits.shape[:1], dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor, None]:
    logits, targets, lse = ctx.saved_tensors
    # In place on one buffer: this gradient is the largest tensor of the head.
    p = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp_()
    p.scatter_add_(-1, targets.unsqueeze(-1), p.new_full((targets.shape[0], 1), -1.0))
    return p.mul_(grad / logits.shape[0]).to(logits.dtype), None


cross_entropy.register_autograd(_backward, setup_context=_setup)
