"""Sorting (token, choice) rows by expert and back, in plain torch: the oracle of `op.py`.

T tokens, k choices a token, N = T * k rows, H hidden. Row t * k + j is choice j of token t.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_by_expert(choices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (order [N], place [N], counts [E]), all int64.

    order[i] is the row that comes i-th when rows are sorted by expert, ties in row order;
    place is its inverse; counts are the rows of each expert.
    """
    flat = choices.reshape(-1)
    order = torch.argsort(flat, stable=True)
    positions = torch.arange(order.numel(), device=order.device)
    place = torch.empty_like(order).scatter_(0, order, positions)
    counts = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    return order, place, counts


def permute(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Returns the tokens' rows [N, H] in expert order."""
    return x[order // top_k]


def unpermute(rows: Tensor, weights: Tensor, place: Tensor) -> Tensor:
    """Returns for each token the weighted sum [T, H] of its k rows."""
    tokens, top_k = weights.shape
    chosen = rows[place].reshape(tokens, top_k, -1)
    return (chosen * weights.unsqueeze(-1).to(rows.dtype)).sum(1)
