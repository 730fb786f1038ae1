"""A text that is read while the run goes on: sample g is still the same whoever asks for it.

The tape of tokens (tape.py) is cut into sequences; each block of about a million tokens is
shuffled by itself, so that nothing but the tokens near a step has ever to be there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from flopwright.errors import InputError, Violation
from flopwright.executor.data.batches import (
    HELD_OUT_FILE,
    HELD_OUT_STARTS_FILE,
    TOKENIZER_FILE,
    check_tokenizer,
    open_array,
    open_starts,
)
from flopwright.executor.data.order import DocumentStarts, Ordered, held_out_rows, ramp_of
from flopwright.executor.data.pieces import read_pieces
from flopwright.executor.data.skips import Spans
from flopwright.executor.data.tape import Tape
from flopwright.executor.data.token_batch import TokenBatch
from flopwright.spec.base import Spec
from flopwright.spec.phases import BatchLevel
from flopwright.spec.workload import Workload

STREAM_FILE: Final = "stream.json"
PIECES_FILE: Final = "pieces.json"
SHUFFLED_TOKENS: Final = 2**20
# Beside seed and block, so that no other order is drawn from the same numbers.
_STREAM: Final = 0x626C6F


class StreamMeta(Spec):
    """What a streamed text is read with.

    Attributes:
        tokenizer_hash: sha256 of tokenizer.json.
        vocab_size: that of the model; the tokenizer's ids are below it.
        pieces: parts that the text is read in.
        sampled_bytes: of text that the tokenizer and the held-out text were made from.
        held_out_below: see `tape.Tape`.
    """

    schema_version: int = 1
    source: str
    pieces: PositiveInt
    sampled_bytes: PositiveInt
    tokenizer_kind: str
    tokenizer_hash: str
    vocab_size: PositiveInt
    held_out_below: NonNegativeInt
    held_out_tokens: PositiveInt


@lru_cache(maxsize=16)
def _order(rows: int, seed: int, block: int) -> NDArray[np.int64]:
    """Returns the sequences of a block in the order in which they are read."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, _STREAM, block])).random_raw(rows)
    return np.argsort(raw, kind="stable").astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedDataset(Ordered):
    """A streamed text and the order in which a workload reads it.

    Attributes:
        held_out: token ids [N], memory-mapped; held_out_starts: of their documents.
        documents: whether documents of a row see only themselves.
        block_rows: sequences that are shuffled together.
    """

    folder: Path
    meta: StreamMeta
    tape: Tape
    held_out: NDArray[Any]
    held_out_starts: DocumentStarts | None
    seq_len: int
    global_batch_size: int
    seed: int
    ramp: tuple[BatchLevel, ...] = ()
    skipped: Spans = ()
    documents: bool = False
    block_rows: int

    @property
    def packed(self) -> bool:
        """Whether documents of a row see only themselves."""
        return self.documents

    def held_out_sequences(self, max_sequences: int | None = None) -> NDArray[np.int64]:
        """Returns the held-out sequences, [count, seq_len + 1]; targets do not overlap."""
        return self.held_out_batch(max_sequences).tokens

    def held_out_batch(self, max_sequences: int | None = None) -> TokenBatch:
        """Returns the same, with their documents where these are packed."""
        return held_out_rows(self.held_out, self.held_out_starts, self.seq_len, max_sequences)

    def _places(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first token of each sample on the tape."""
        blocks, inside = np.divmod(samples, self.block_rows)
        rows = [
            block * self.block_rows + _order(self.block_rows, self.seed, int(block))[place]
            for block, place in zip(blocks, inside, strict=True)
        ]
        return np.array(rows, dtype=np.int64) * self.seq_len

    def _samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        places, length = self._places(samples), self.seq_len + 1
        rows = [self.tape.read(int(place), length).tokens for place in places]
        return np.array(rows, dtype=np.int64).reshape(len(samples), length)

    def _starts(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        found = np.zeros((len(samples), self.seq_len + 1), dtype=np.bool_)
        for row, place in enumerate(self._places(samples)):
            found[row, self.tape.read(int(place), self.seq_len + 1).starts] = True
        return found


def open_stream(
    folder: Path,
    workload: Workload,
    vocab_size: int | None = None,
    share: tuple[int, int] = (0, 1),
) -> StreamedDataset:
    """Returns the streamed text of `folder` as `workload` reads it; any rank may call it.

    Args:
        share: (this reader's number, how many there are).

    Raises:
        InputError: missing or broken files, another tokenizer or vocabulary.
    """
    path = folder / STREAM_FILE
    try:
        meta = StreamMeta.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        rule = "not the record of a streamed text"
        raise InputError(Violation(file=str(path), rule=rule)) from error
    if vocab_size is not None and meta.vocab_size != vocab_size:
        rule = f"the text was prepared for another vocabulary than the model's {vocab_size}"
        raise InputError(
            Violation(file=str(path), field="vocab_size", value=str(meta.vocab_size), rule=rule)
        )
    tape = Tape(
        folder=folder,
        pieces=read_pieces(folder / PIECES_FILE),
        tokenizer=check_tokenizer(folder / TOKENIZER_FILE, meta.tokenizer_hash),
        vocab_size=meta.vocab_size,
        held_out_below=meta.held_out_below,
        seed=workload.seed,
        share=share,
    )
    packed = workload.packing is not None
    return StreamedDataset(
        folder=folder,
        meta=meta,
        tape=tape,
        held_out=open_array(folder / HELD_OUT_FILE, meta.held_out_tokens),
        held_out_starts=open_starts(folder / HELD_OUT_STARTS_FILE, meta.held_out_tokens, packed),
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        seed=workload.seed,
        ramp=ramp_of(workload),
        documents=packed,
        block_rows=max(1, SHUFFLED_TOKENS // workload.seq_len),
    )
