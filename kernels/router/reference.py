"""Choice of experts from a router's logits in plain torch: the oracle of `op.py`."""

from __future__ import annotations

import torch
from torch import Tensor


def choose(
    scores: Tensor, bias: Tensor | None, top_k: int, num_groups: int, top_k_groups: int
) -> Tensor:
    """Returns the chosen experts [T, k] int64 (DeepSeek-V3's "noaux_tc", arXiv 2412.19437).

    Selection is by scores + bias; with groups, only the `top_k_groups` groups with the
    largest sum of their two best experts can be chosen from.
    """
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    if num_groups > 1:
        grouped = biased.reshape(biased.shape[0], num_groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        kept = best.topk(top_k_groups, -1).indices
        closed = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        biased = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)
    return biased.topk(top_k, -1).indices


def weigh(scores: Tensor, choices: Tensor, normalise: bool, scale: float) -> Tensor:
    """Returns the weights [T, k] of the chosen experts, from the scores without bias."""
    chosen = scores.gather(-1, choices)
    if normalise:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen * scale


def score(logits: Tensor, softmax: bool) -> Tensor:
    """Returns scores [T, E]: independent sigmoids, or a softmax over the experts."""
    return logits.softmax(-1) if softmax else logits.sigmoid()
