"""From documents to one stream of token ids that knows where each of them begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flopwright.executor.data.tokenizer import Tokenizer

_DOCUMENTS_AT_ONCE: Final = 64


class Encoded(NamedTuple):
    """Token ids of documents in one stream, and where each of them begins."""

    tokens: NDArray[Any]
    starts: NDArray[np.int64]


def token_dtype(vocab_size: int) -> type[np.uint16 | np.uint32]:
    """Returns what ids of a vocabulary are stored as."""
    return np.uint16 if vocab_size <= 2**16 else np.uint32


def encode_documents(
    documents: Sequence[str],
    tokenizer: Tokenizer,
    vocab_size: int,
    progress: Callable[[float], None] | None = None,
) -> Encoded:
    """Returns the documents in one stream, each ended by the end-of-document id."""
    dtype = token_dtype(vocab_size)
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    parts: list[NDArray[Any]] = []
    for start in range(0, len(documents), _DOCUMENTS_AT_ONCE):
        encoded = tokenizer.encode_batch(documents[start : start + _DOCUMENTS_AT_ONCE])
        parts += [np.array(ids + end, dtype=dtype) for ids in encoded]
        if progress is not None:
            progress(min(1.0, (start + _DOCUMENTS_AT_ONCE) / len(documents)))
    lengths = np.array([len(ids) for ids in parts], dtype=np.int64)
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)
    return Encoded(tokens, lengths.cumsum() - lengths)
