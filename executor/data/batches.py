"""Which tokens step s trains on: a function of seed, step and sample, not of the plan.

Sample g of the run (g = step * global_batch_size + position in the batch) is the same
tokens whatever the number of ranks or the micro-batch size; a plan only decides who reads it.
"""

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
from flopwright.executor.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_hash
from flopwright.spec.base import Spec
from flopwright.spec.workload import Workload

TRAIN_FILE: Final = "train_tokens.npy"
HELD_OUT_FILE: Final = "held_out_tokens.npy"
META_FILE: Final = "meta.json"
TOKENIZER_FILE: Final = "tokenizer.json"
DATA_FILES: Final = (TRAIN_FILE, HELD_OUT_FILE, TOKENIZER_FILE, META_FILE)


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


class Ordered:
    """What a run reads: sample g is the same whoever reads it, and known without those before."""

    __slots__ = ()
    seq_len: int
    global_batch_size: int

    def batch(self, step: int) -> NDArray[np.int64]:
        """Returns the tokens of step `step`, [global_batch_size, seq_len + 1]."""
        first = step * self.global_batch_size
        return self._samples(np.arange(first, first + self.global_batch_size))

    def rank_slice(
        self, step: int, dp_rank: int, dp: int, micro_batch_size: int
    ) -> NDArray[np.int64]:
        """Returns one data-parallel rank's micro-batches of a step.

        The global batch is cut into micro-batches in order; micro-batch m of rank r is the
        (m * dp + r)-th.

        Args:
            step: 0-based optimizer step.
            dp_rank: index of the rank among the `dp` data-parallel ranks.
            dp: data-parallel ranks.
            micro_batch_size: sequences a micro-batch.

        Returns:
            [num_microbatches, micro_batch_size, seq_len + 1]
        """
        assert 0 <= dp_rank < dp
        assert self.global_batch_size % (dp * micro_batch_size) == 0
        index = np.arange(self.global_batch_size).reshape(-1, dp, micro_batch_size)[:, dp_rank]
        samples = step * self.global_batch_size + index
        return self._samples(samples.ravel()).reshape(*samples.shape, self.seq_len + 1)

    def samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns samples of the run by number, [len(samples), seq_len + 1]."""
        return self._samples(samples)

    def _samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset(Ordered):
    """Prepared tokens and the order in which a workload reads them.

    Attributes:
        train, held_out: token ids [N], memory-mapped; a sequence that runs past the end goes
            on at the start, so a text shorter than a sequence is repeated.
    """

    folder: Path
    meta: DataMeta
    train: NDArray[Any]
    held_out: NDArray[Any]
    seq_len: int
    global_batch_size: int
    seed: int

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
        count = max(1, (len(self.held_out) - 1) // self.seq_len)
        starts = np.arange(count, dtype=np.int64) * self.seq_len
        if max_sequences is not None and max_sequences < count:
            starts = starts[np.arange(max_sequences) * count // max_sequences]
        return self._windows(self.held_out, starts)

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

    def _samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        epochs, positions = np.divmod(samples, self.samples_per_epoch)
        starts = np.array(
            [
                _epoch_starts(len(self.train), self.seq_len, self.seed, int(epoch))[position]
                for epoch, position in zip(epochs, positions, strict=True)
            ],
            dtype=np.int64,
        )
        return self._windows(self.train, starts)

    def _windows(self, stream: NDArray[Any], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        index = (starts[:, None] + np.arange(self.seq_len + 1)) % len(stream)
        return np.asarray(stream[index], dtype=np.int64)


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
    return Dataset(
        folder=folder,
        meta=meta,
        train=_open_tokens(folder / TRAIN_FILE, meta.train_tokens),
        held_out=_open_tokens(folder / HELD_OUT_FILE, meta.held_out_tokens),
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        seed=workload.seed,
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


def _open_tokens(path: Path, expected: int) -> NDArray[Any]:
    try:
        tokens: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(
            Violation(file=str(path), rule=f"not a readable token file: {error}")
        ) from error
    if tokens.ndim != 1 or tokens.dtype.kind != "u" or len(tokens) != expected:
        raise InputError(
            Violation(
                file=str(path),
                rule=f"expected {expected} token ids",
                value=f"{tokens.dtype} {tokens.shape}",
            )
        )
    return tokens
