"""Embedding lookup in plain torch: the oracle of `op.py`."""

from __future__ import annotations

from torch import Tensor


def embedding(tokens: Tensor, weight: Tensor) -> Tensor:
    """Returns the rows of weight [vocabulary, H] named by tokens [...]: [..., H]."""
    return weight[tokens]
