"""What the loss of draft heads costs: both heads' logits, twice forward and once back."""

from __future__ import annotations

from numpy.typing import ArrayLike

from flopwright.kernels.linear_cross_entropy.cost import linear_cross_entropy
from flopwright.ops import CostBuilder


def linear_lk_loss(
    cost: CostBuilder, name: str, *, tokens: ArrayLike, hidden: ArrayLike, vocab: ArrayLike,
    dtype: str,
) -> None:  # fmt: skip
    """Adds forward and backward; both sides have the same hidden width.

    Forward: log-sum-exps of both, then their overlap. Backward: both again for the gradient
    of the draft's logits, and its two products.
    """
    linear_cross_entropy(
        cost, name, tokens=tokens, hidden=hidden, vocab=vocab, dtype=dtype, sides=2
    )
