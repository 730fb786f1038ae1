"""Head and cross-entropy over a part of the vocabulary, and how the parts are joined.

N tokens; the part's first column is number `first` of the vocabulary. The ops have no gradient
of their own: whoever joins the parts knows it (executor/parallel/tensor.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.linear_cross_entropy.op import gradients, statistics


@torch.library.custom_op("flopwright::linear_cross_entropy_terms", mutates_args=())
def part_terms(x: Tensor, weight: Tensor, targets: Tensor, first: int) -> Tensor:
    """Returns [3, N], at least fp32: the largest logit, log of the sum of e^(logit - it), chosen.

    The last is the target's logit, 0 where it is in another part.

    Args:
        x: [N, hidden]; weight: [part, hidden]; targets: [N] int64 over the whole vocabulary.
    """
    lse, chosen = statistics(x, weight, targets - first)
    return torch.stack((*lse, chosen))


@part_terms.register_fake
def _(x: Tensor, weight: Tensor, targets: Tensor, first: int) -> Tensor:
    return x.new_empty((3, x.shape[0]), dtype=wide_dtype(x.dtype))


def joined(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log-sum-exp in two parts [2, N], the target's logit [N]) of terms [3, parts, N]."""
    level = terms[0].amax(0)
    log_sum = (terms[0] - level + terms[1]).logsumexp(0)
    return torch.stack((level, log_sum)), terms[2].sum(0)


@torch.library.custom_op("flopwright::linear_cross_entropy_part_backward", mutates_args=())
def part_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Returns the part's summand of the gradient of x, and the gradient of its weight.

    Args:
        grad: that of the mean, shape (); lse: [2, N] of the whole vocabulary.
    """
    return gradients(grad, x, weight, targets - first, lse)


@part_gradients.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)
