"""Cross-entropy over a part of the vocabulary: what a part adds, and the gradient of its logits.

N tokens, V columns of this part, the first of which is number `first` of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def part_terms(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Returns [2, N], at least fp32: log-sum-exp of the part, and the target's logit or 0.

    Args:
        logits: [N, V]; targets: [N] int64 over the whole vocabulary.
    """
    wide = logits.to(wide_dtype(logits.dtype))
    places, inside = _places(targets, first, logits.shape[1])
    chosen = wide.gather(-1, places.unsqueeze(-1)).squeeze(-1)
    return torch.stack((torch.logsumexp(wide, -1), chosen * inside))


def part_gradient(
    grad: Tensor, logits: Tensor, targets: Tensor, lse: Tensor, first: int
) -> Tensor:
    """Returns the gradient [N, V] of the mean loss.

    Args:
        grad: that of the mean, shape (), or times the weight of each row, [N, 1].
        lse: [N] over the whole vocabulary.
    """
    places, inside = _places(targets, first, logits.shape[1])
    # In place on one buffer: this gradient is the largest tensor of the head.
    p = (logits.to(lse.dtype) - lse.unsqueeze(-1)).exp_()
    p.scatter_add_(-1, places.unsqueeze(-1), -inside.to(p.dtype).unsqueeze(-1))
    return p.mul_(grad / logits.shape[0]).to(logits.dtype)


def _places(targets: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """Returns the targets' columns in the part (0 for those outside), and which are inside."""
    places = targets - first
    inside = (places >= 0) & (places < width)
    return places * inside, inside
