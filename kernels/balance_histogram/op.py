"""The histogram of quantile balancing as an op, outside of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.balance_histogram import reference
from flopwright.kernels.dispatch import runs_triton


@torch.library.custom_op("flopwright::balance_histogram", mutates_args=())
def balance_histogram(scores: Tensor, alpha: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Returns counts [E, bins] int32 of alpha_i - s_ij; see `reference.histogram`."""
    if runs_triton("balance_histogram", scores):
        import flopwright.kernels.balance_histogram.kernel as kernel

        return kernel.histogram(scores, alpha, low, high, bins)
    return reference.histogram(scores, alpha, low, high, bins)


@balance_histogram.register_fake
def _(scores: Tensor, alpha: Tensor, low: float, high: float, bins: int) -> Tensor:
    return scores.new_empty((scores.shape[1], bins), dtype=torch.int32)
