"""Cross-entropy in plain torch: the oracle of `op.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (mean negative log-likelihood in nats, log-sum-exp [N]), at least fp32.

    Args:
        logits: [N, vocabulary]; targets: [N] int64.
    """
    wide = logits.to(wide_dtype(logits.dtype))
    lse = torch.logsumexp(wide, -1)
    chosen = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return (lse - chosen).mean(), lse
