"""The loss of the output head; the head itself is a projection."""

from __future__ import annotations

from torch import Tensor

from flopwright.kernels.cross_entropy.op import cross_entropy


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean negative log-likelihood in nats a token, at least fp32.

    Args:
        logits: [..., vocabulary]; targets: [...] int64.
    """
    mean: Tensor
    mean, _ = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    return mean
