"""The loss of the output head; the head itself is a projection."""

from __future__ import annotations

from torch import Tensor

from flopwright.kernels.cross_entropy.op import cross_entropy
from flopwright.kernels.cross_entropy.weighted import weighted_cross_entropy


def loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns the mean negative log-likelihood in nats a token, at least fp32.

    Args:
        logits: [..., vocabulary]; targets: [...] int64.
        weights: [...], by which tokens count; their mean over a step is 1. None: all alike.
    """
    mean: Tensor
    rows, wanted = logits.reshape(-1, logits.shape[-1]), targets.reshape(-1)
    if weights is None:
        mean, _ = cross_entropy(rows, wanted)
    else:
        mean, _ = weighted_cross_entropy(rows, wanted, weights.reshape(-1))
    return mean
