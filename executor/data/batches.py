"""Prepared tokens and the order in which a run reads them: shuffled anew in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import NonNegativeInt, PositiveInt, ValidationError

from flopwright.errors import InputError, Violation
from flopwright.executor.data.entropy import bigram_entropy, unigram_entropy
from flopwright.executor.data.order import (
    DocumentStarts,
    Ordered,
    held_out_rows,
    ramp_of,
    windows,
)
from flopwright.executor.data.skips import Spans
from flopwright.executor.data.token_batch import TokenBatch
from flopwright.executor.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from flopwright.spec.base import Spec
from flopwright.spec.phases import BatchLevel
from flopwright.spec.workload import Workload

TRAIN_FILE: Final = "train_tokens.npy"
HELD_OUT_FILE: Final = "held_out_tokens.npy"
TRAIN_STARTS_FILE: Final = "train_documents.npy"
HELD_OUT_STARTS_FILE: Final = "held_out_documents.npy"
META_FILE: Final = "meta.json"
TOKENIZER_FILE: Final = "tokenizer.json"
DATA_FILES: Final = (
    TRAIN_FILE, HELD_OUT_FILE, TRAIN_STARTS_FILE, HELD_OUT_STARTS_FILE, TOKENIZER_FILE, META_FILE,
)  # fmt: skip


class DataMeta(Spec):
    """What prepared data is made of.

    Attributes:
        text_hash: sha256 over the documents.
        tokenizer_hash: sha256 of tokenizer.json.
        vocab_size: that of the model; the tokenizer's ids are below it.
        split_rule: see `split.Split.rule`.
        skipped_files, truncated: see `text.TextCorpus`.
    """

    schema_version: int = 1
    source: str
    text_hash: str
    text_size: PositiveInt
    documents: PositiveInt
    duplicates: NonNegativeInt
    skipped_files: NonNegativeInt
    truncated: bool
    split_rule: str
    tokenizer_kind: str
    tokenizer_hash: str
    vocab_size: PositiveInt
    train_tokens: PositiveInt
    held_out_tokens: PositiveInt


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropies:
    """Nats a token that counts alone reach on the held-out tokens."""

    unigram: float
    bigram: float


@lru_cache(maxsize=64)
def _epoch_starts(num_tokens: int, seq_len: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the first token of each sample of an epoch, in order.

    The stream is a ring: each epoch cuts it at a random phase into floor(N / seq_len)
    sequences (one, where the text is shorter than a sequence) and shuffles them.
    """
    # Raw words of the bit generator: NumPy keeps them equal in every version, which it does
    # not promise for Generator.permutation.
    count = max(1, num_tokens // seq_len)
    raw = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count + 1)
    phase = int(raw[0]) % num_tokens
    order = np.argsort(raw[1:], kind="stable").astype(np.int64)
    return (order * seq_len + phase) % num_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(Ordered):
    """Prepared tokens and the order in which a workload reads them.

    Attributes:
        train, held_out: token ids [N], memory-mapped; a sequence that runs past the end goes
            on at the start, so a text shorter than a sequence is repeated.
        train_starts, held_out_starts: of their documents; None where they are not packed.
    """

    folder: Path
    meta: DataMeta
    train: NDArray[Any]
    held_out: NDArray[Any]
    seq_len: int
    global_batch_size: int
    seed: int
    ramp: tuple[BatchLevel, ...] = ()
    skipped: Spans = ()
    train_starts: DocumentStarts | None = None
    held_out_starts: DocumentStarts | None = None

    @property
    def packed(self) -> bool:
        """Whether documents of a row see only themselves."""
        return self.train_starts is not None

    def held_out_batches(
        self, batch_size: int, max_sequences: int | None = None
    ) -> Iterator[NDArray[np.int64]]:
        """Yields the held-out sequences in order, [at most batch_size, seq_len + 1] each."""
        rows = self.held_out_sequences(max_sequences)
        for start in range(0, len(rows), batch_size):
            yield rows[start : start + batch_size]

    def held_out_sequences(self, max_sequences: int | None = None) -> NDArray[np.int64]:
        """Returns the held-out sequences, [count, seq_len + 1]; targets do not overlap.

        Of more than `max_sequences` those are taken that lie evenly over the held-out text.
        """
        return self.held_out_batch(max_sequences).tokens

    def held_out_batch(self, max_sequences: int | None = None) -> TokenBatch:
        """Returns the same, with their documents where these are packed."""
        return held_out_rows(self.held_out, self.held_out_starts, self.seq_len, max_sequences)

    def entropies(self, max_sequences: int | None = None) -> Entropies:
        """Returns the entropies over the targets of `held_out_sequences(max_sequences)`."""
        rows = self.held_out_sequences(max_sequences)
        return Entropies(
            unigram=unigram_entropy(self.train, rows, self.meta.vocab_size),
            bigram=bigram_entropy(self.train, rows, self.meta.vocab_size),
        )

    def tokenizer(self) -> Tokenizer:
        """Returns the tokenizer that made the tokens."""
        return load_tokenizer(self.folder / TOKENIZER_FILE)

    @property
    def samples_per_epoch(self) -> int:
        """Sequences until the text has been read once."""
        return max(1, len(self.train) // self.seq_len)

    def _places(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the first token of each sample."""
        epochs, positions = np.divmod(samples, self.samples_per_epoch)
        return np.array(
            [
                _epoch_starts(len(self.train), self.seq_len, self.seed, int(epoch))[position]
                for epoch, position in zip(epochs, positions, strict=True)
            ],
            dtype=np.int64,
        )

    def _samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        return windows(self.train, self._places(samples), self.seq_len + 1)

    def _starts(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        assert self.train_starts is not None
        return self.train_starts.rows(self._places(samples), self.seq_len + 1)

    def _start_counts(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        assert self.train_starts is not None
        return self.train_starts.counts(self._places(samples) + 1, self.seq_len)


def open_dataset(folder: Path, workload: Workload, vocab_size: int | None = None) -> Dataset:
    """Returns the prepared data of `folder` as `workload` reads it; any rank may call it.

    Raises:
        InputError: a missing or broken file, a tokenizer that is not the one the tokens were
            made with, or a vocabulary that is not `vocab_size`.
    """
    meta = _read_meta(folder / META_FILE)
    if vocab_size is not None and meta.vocab_size != vocab_size:
        raise InputError(
            Violation(
                file=str(folder / META_FILE),
                field="vocab_size",
                value=str(meta.vocab_size),
                rule=f"the data was prepared for another vocabulary than the model's {vocab_size}",
                nearest_fix="prepare the data again, in another folder",
            )
        )
    check_tokenizer(folder / TOKENIZER_FILE, meta.tokenizer_hash)
    packed = workload.packing is not None
    return Dataset(
        folder=folder,
        meta=meta,
        train=open_array(folder / TRAIN_FILE, meta.train_tokens),
        held_out=open_array(folder / HELD_OUT_FILE, meta.held_out_tokens),
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        seed=workload.seed,
        ramp=ramp_of(workload),
        train_starts=open_starts(folder / TRAIN_STARTS_FILE, meta.train_tokens, packed),
        held_out_starts=open_starts(folder / HELD_OUT_STARTS_FILE, meta.held_out_tokens, packed),
    )


def check_tokenizer(path: Path, expected_hash: str) -> Tokenizer:
    """Returns the tokenizer of `path`.

    Raises:
        InputError: its hash is not `expected_hash`: ids would mean other text.
    """
    tokenizer = load_tokenizer(path)
    found = tokenizer_hash(tokenizer)
    if found != expected_hash:
        raise InputError(
            Violation(
                file=str(path),
                field="tokenizer_hash",
                value=found[:16],
                rule=f"another tokenizer than the one used before ({expected_hash[:16]})",
                nearest_fix="use the tokenizer.json of the run, or start a new run",
            )
        )
    return tokenizer


def _read_meta(path: Path) -> DataMeta:
    try:
        return DataMeta.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(
            Violation(file=str(path), rule=f"cannot read prepared data: {error.strerror}")
        ) from error
    except ValidationError as error:
        raise InputError(
            Violation(file=str(path), rule="not the record of prepared data")
        ) from error


def open_starts(path: Path, size: int, packed: bool) -> DocumentStarts | None:
    """Returns where the documents of a stream of `size` tokens begin, if they are packed."""
    return DocumentStarts(open_array(path), size) if packed else None


def open_array(path: Path, expected: int | None = None) -> NDArray[Any]:
    """Returns a memory-mapped file of token ids (`expected` of them), or of places."""
    try:
        found: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            Violation(file=str(path), rule=f"not a readable token file: {error}")
        ) from error
    kind = "u" if expected is not None else "i"
    if found.ndim != 1 or found.dtype.kind != kind or len(found) != (expected or len(found)):
        raise InputError(
            Violation(
                file=str(path),
                rule="expected places of documents"
                if expected is None
                else f"expected {expected} token ids",
                value=f"{found.dtype} {found.shape}",
            )
        )
    return found
