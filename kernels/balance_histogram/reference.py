"""Quantile balancing from a histogram in plain torch: the oracle of `op.py`.

Every expert should get m k / n of m tokens. With alpha_i the (k + 1)-th largest biased score
of token i, expert j takes token i when s_ij + b_j > alpha_i; so b_j is the quantile of
r_ij = alpha_i - s_ij below which m k / n tokens lie. Histograms of r add up over ranks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def histogram(scores: Tensor, alpha: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Returns counts [E, bins] int32 of alpha_i - s_ij in equal bins over [low, high].

    Numbers outside count in the first or the last bin, NaN in the last: never chosen.

    Args:
        scores: [T, E]; alpha: [T].
    """
    r = alpha.unsqueeze(1).float() - scores.float()
    place = ((r - low) * (bins / (high - low))).floor().nan_to_num(bins - 1)
    place = place.clamp(0, bins - 1).to(torch.int64)
    counts = torch.zeros(scores.shape[1], bins, dtype=torch.int32, device=scores.device)
    return counts.scatter_add_(1, place.t(), torch.ones_like(place.t(), dtype=torch.int32))


def biases(counts: Tensor, low: float, high: float, top_k: int) -> Tensor:
    """Returns the experts' biases [E] of mean zero, interpolated inside their bins.

    Args:
        counts: [E, bins] over all tokens of all ranks.
        top_k: choices of a token.
    """
    experts, bins = counts.shape
    tokens = int(counts[0].sum())
    rank = tokens * top_k / experts
    below = counts.double().cumsum(1)
    found = (below < math.ceil(rank)).sum(1).clamp(max=bins - 1)  # the first bin that reaches it
    inside = counts.double().gather(1, found.unsqueeze(1)).squeeze(1).clamp(min=1)
    before = below.gather(1, found.unsqueeze(1)).squeeze(1) - inside
    share = ((rank - before) / inside).clamp(0, 1)
    bias = low + (found + share) * ((high - low) / bins)
    return bias - bias.mean()
