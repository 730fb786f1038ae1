"""How well token counts alone predict the held-out text: the bar a model must clear.

Both are cross-entropies in nats a token of an add-one-smoothed model counted on the
training tokens, taken over exactly the tokens that the held-out loss is taken over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[Any]


def _pairs(held_out: Tokens) -> tuple[Tokens, Tokens]:
    """Returns (previous, predicted) tokens of a stream [n] or of sequences [count, seq + 1]."""
    rows = np.atleast_2d(np.asarray(held_out)).astype(np.int64)
    return rows[:, :-1].ravel(), rows[:, 1:].ravel()


def unigram_entropy(train: Tokens, held_out: Tokens, vocab_size: int) -> float:
    """Returns the mean of -ln((count(t) + 1) / (N + V)) over the predicted held-out tokens t.

    Args:
        train: token ids [N].
        held_out: token ids, a stream [n] or sequences [count, seq + 1]; the first token of
            each is context only.
        vocab_size: V.
    """
    counts = np.bincount(np.asarray(train).astype(np.int64, copy=False), minlength=vocab_size)
    _, predicted = _pairs(held_out)
    logs = np.log(counts[predicted] + 1.0) - np.log(len(train) + vocab_size)
    return float(-logs.mean())


def bigram_entropy(train: Tokens, held_out: Tokens, vocab_size: int) -> float:
    """Returns the mean of -ln((count(s, t) + 1) / (count(s) + V)) over held-out pairs (s, t).

    count(s) counts s as the first of a training pair. Arguments as in `unigram_entropy`.
    """
    stream = np.asarray(train).astype(np.int64, copy=False)
    codes, counts = np.unique(stream[:-1] * vocab_size + stream[1:], return_counts=True)
    firsts = np.bincount(stream[:-1], minlength=vocab_size)
    previous, predicted = _pairs(held_out)
    wanted = previous * vocab_size + predicted
    at = np.minimum(np.searchsorted(codes, wanted), len(codes) - 1)
    seen = np.where(codes[at] == wanted, counts[at], 0)
    logs = np.log(seen + 1.0) - np.log(firsts[previous] + float(vocab_size))
    return float(-logs.mean())
