"""One batch type for pre-training, SFT and RL: tokens, their weights in the loss, documents.

S tokens a row. A row may hold several documents one behind the other: attention and positions
begin anew at each of them, and no token is asked to predict the next document's first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Rows of tokens and what stands beside them; the dimensions before the last are the reader's.

    Attributes:
        tokens: [..., S + 1], each row's tokens and the one behind the last.
        starts: [..., S] bool, where a document begins (a row's first token always does); None:
            a row is one document.
        weights: [..., S] of the loss of predicting token i + 1 from token i; 0 leaves it out.
            They are relative to each other over all of a step's batch. None: all alike.
        total_weight: their sum over all of the step's batch, all ranks together, if known.
    """

    tokens: Tokens
    starts: NDArray[np.bool_] | None = None
    weights: NDArray[np.float64] | None = None
    total_weight: float | None = None

    def __post_init__(self) -> None:
        inner = (*self.tokens.shape[:-1], self.tokens.shape[-1] - 1)
        assert self.starts is None or self.starts.shape == inner
        assert self.weights is None or self.weights.shape == inner

    def __getitem__(self, index: Any) -> TokenBatch:
        """Returns some of the rows, by index of the first dimension."""
        return TokenBatch(
            tokens=self.tokens[index],
            starts=None if self.starts is None else self.starts[index],
            weights=None if self.weights is None else self.weights[index],
            total_weight=self.total_weight,
        )

    def __len__(self) -> int:
        return len(self.tokens)


def positions_in_documents(starts: NDArray[np.bool_]) -> Tokens:
    """Returns [..., S]: each token's place in its document, counted from where it begins."""
    places = np.broadcast_to(np.arange(starts.shape[-1]), starts.shape)
    begun = np.maximum.accumulate(np.where(starts, places, 0), axis=-1)
    found: Tokens = (places - begun).astype(np.int64)
    return found


def document_bounds(starts: NDArray[np.bool_]) -> tuple[int, ...]:
    """Returns where documents begin in the rows [B, S] laid end to end, and their end B * S."""
    flags = starts.copy()
    flags[..., 0] = True
    return (*np.flatnonzero(flags).tolist(), flags.size)


def at_document_ends(starts: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Returns weights [..., S]: 0 where the token behind begins a document, else 1.

    Args:
        starts: [..., S + 1]: of each row's tokens and of the one behind the last.
    """
    return 1.0 - starts[..., 1:].astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A document to be packed: its tokens, and the weights of predicting each but the first."""

    tokens: Sequence[int]
    weights: Sequence[float] | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) > 1
        assert self.weights is None or len(self.weights) == len(self.tokens) - 1


def pack(documents: Sequence[Document], seq_len: int, pad_id: int) -> TokenBatch:
    """Returns the documents whole in the rows that first fit by falling length gives.

    What is left of a row is filled with `pad_id` as a document that no loss is taken of. The
    last token of a document predicts nothing.

    Args:
        seq_len: a row is seq_len + 1 tokens, and no document is longer.
    """
    order = sorted(range(len(documents)), key=lambda i: -len(documents[i].tokens))
    rows: list[list[int]] = []
    room: list[int] = []
    for number in order:
        needed = len(documents[number].tokens)
        assert needed <= seq_len + 1, f"a document of {needed} tokens in rows of {seq_len + 1}"
        place = next((i for i, left in enumerate(room) if left >= needed), len(rows))
        if place == len(rows):
            rows.append([])
            room.append(seq_len + 1)
        rows[place].append(number)
        room[place] -= needed
    return _filled([[documents[i] for i in sorted(row)] for row in rows], seq_len, pad_id)


def _filled(rows: Sequence[Sequence[Document]], seq_len: int, pad_id: int) -> TokenBatch:
    tokens = np.full((len(rows), seq_len + 1), pad_id, dtype=np.int64)
    starts = np.zeros((len(rows), seq_len), dtype=np.bool_)
    weights = np.zeros((len(rows), seq_len))
    for row, documents in enumerate(rows):
        at = 0
        for document in documents:
            end = at + len(document.tokens)
            tokens[row, at:end] = document.tokens
            starts[row, at] = True
            weights[row, at : end - 1] = 1.0 if document.weights is None else document.weights
            at = end
        starts[row, at : at + 1] = True  # the padding, if there is room for it
    return TokenBatch(
        tokens=tokens, starts=starts, weights=weights, total_weight=float(weights.sum())
    )


def joined(batches: Sequence[TokenBatch]) -> TokenBatch:
    """Returns rows one behind the other; all have documents and weights, or none has."""
    first = batches[0]

    def both(name: str) -> Any:
        parts = [getattr(batch, name) for batch in batches]
        return None if getattr(first, name) is None else np.concatenate(parts)

    return TokenBatch(tokens=both("tokens"), starts=both("starts"), weights=both("weights"))
