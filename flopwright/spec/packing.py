"""Documents packed in rows, and how much of causal attention they leave.

A row of S tokens is cut out of documents that stand one behind the other; a token sees those of
its own document in its row. How many that are on average follows from the documents' lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from flopwright.spec.base import Spec

MAX_DOCUMENT: int = 2**40


class DocumentLength(Spec):
    """Documents of about so many tokens, and their share by number (of any sum)."""

    tokens: int = Field(ge=1, le=MAX_DOCUMENT)
    share: float = Field(ge=1e-9, le=1e9)


class Packing(Spec):
    """Documents of a row see only themselves, and positions begin anew with each.

    Attributes:
        lengths: of the documents; (): not known, and attention is priced as if a row were one.
    """

    lengths: tuple[DocumentLength, ...] = Field(default=(), max_length=4096)


def causal_share(
    lengths: Sequence[tuple[int, float]], seq_len: int, window: int | None = None
) -> float:
    """Returns which share of a row's causal pairs documents leave, 1 for none.

    A row begins at any token of the documents with the same probability. A token then sees
    min(its place in the document, its place in the row) tokens and itself.

    Args:
        lengths: (tokens, share by number) of documents; () leaves all.
        window: positions that a query sees, itself included; None: all before it.
    """
    if not lengths:
        return 1.0
    tokens = sum(length * share for length, share in lengths)
    seen = sum(_pairs(length, seq_len, window) * share for length, share in lengths)
    return (seen / tokens) / _row_pairs(seq_len, window)


def _pairs(length: int, seq_len: int, window: int | None) -> float:
    """Returns the sum of min(i, j, window - 1) + 1 over i < seq_len and j < length.

    For k = 0 .. n - 1 there are (length - k)(seq_len - k) pairs with min(i, j) >= k.
    """
    n = min(length, seq_len) if window is None else min(length, seq_len, window)
    squares = (n - 1) * n * (2 * n - 1) / 6
    return n * float(length) * seq_len - (length + seq_len) * n * (n - 1) / 2 + squares


def _row_pairs(seq_len: int, window: int | None) -> float:
    w = seq_len if window is None else min(window, seq_len)
    return w * (w + 1) / 2 + (seq_len - w) * float(w)
