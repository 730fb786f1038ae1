"""Several documents in a row: where each begins, and attention that stays within them.

The rows [B, S] of a micro-batch are laid end to end: T = B * S tokens, of which a document never
crosses from one row into the next. What is not attention does not know of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from flopwright.kernels.attention.documents import document_attention, document_slices


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a micro-batch.

    Attributes:
        bounds: where they begin, ascending from 0, and their end T.
        positions: [T] int64, of each token in its document.
        angles: tables of rotary embedding at these positions, by who made them.
    """

    bounds: tuple[int, ...]
    positions: Tensor
    angles: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)

    @property
    def longest(self) -> int:
        """Tokens of the longest."""
        lengths = (end - first for first, end in pairwise(self.bounds))
        return max(lengths)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
        """Returns causal attention within each; see `ContextParallel.attend`, with B = 1."""
        out: Tensor = document_attention(q, k, v, self.bounds, scale, window)[0]
        return out

    def each(self, fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Returns what applies `fn` to each document of tensors [1, T, ...] by itself."""

        def applied(*tensors: Tensor) -> Tensor:
            parts = document_slices(self.bounds)
            return torch.cat([fn(*(t[:, part] for t in tensors)) for part in parts], 1)

        return applied


# Where states stand: the first one's position, or the documents of rows laid end to end.
Start = int | Documents
