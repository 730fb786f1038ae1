"""Which samples step s trains on: a function of the step and the batch, not of the plan.

Sample g of a run is the same whatever the number of ranks, the micro-batch size or the ramp of
the batch; a plan only decides who reads it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from flopwright.executor.data.skips import Spans, kept_samples
from flopwright.executor.data.token_batch import TokenBatch, at_document_ends
from flopwright.spec.phases import BatchLevel, batch_at
from flopwright.spec.workload import Workload

# The name of what a run reads where it has no domains.
WHOLE_TEXT: Final = "text"


def ramp_of(workload: Workload) -> tuple[BatchLevel, ...]:
    """Returns the batches of a run in order; () where all its steps have the full one."""
    return () if workload.batch_ramp is None else workload.batch_levels


class Ordered(ABC):
    """What a run reads: sample g is the same whoever reads it, and known without those before.

    Attributes:
        ramp: the batches of the steps in order; (): the full one in each.
        skipped: samples that are left out; those behind them move up.
    """

    __slots__ = ()
    seq_len: int
    global_batch_size: int
    ramp: tuple[BatchLevel, ...]
    skipped: Spans

    @property
    def packed(self) -> bool:
        """Whether documents of a row see only themselves."""
        return False

    def step_samples(self, step: int) -> NDArray[np.int64]:
        """Returns the numbers of the samples of step `step`, in order."""
        first, count = self._place(step)
        return kept_samples(np.arange(first, first + count), self.skipped)

    def first_sample(self, step: int) -> int:
        """Returns how many samples the steps before `step` have, left out ones not counted."""
        return self._place(step)[0]

    def _place(self, step: int) -> tuple[int, int]:
        """Returns (samples before a step, its samples)."""
        if self.ramp:
            return batch_at(self.ramp, self.seq_len, step)
        return step * self.global_batch_size, self.global_batch_size

    def batch(self, step: int) -> NDArray[np.int64]:
        """Returns the tokens of step `step`, [sequences, seq_len + 1]."""
        return self._samples(self.step_samples(step))

    def rank_slice(
        self, step: int, dp_rank: int, dp: int, micro_batch_size: int
    ) -> NDArray[np.int64]:
        """Returns the tokens of one data-parallel rank's micro-batches; see `rank_batch`."""
        samples = self._own(step, dp_rank, dp, micro_batch_size)
        return self._samples(samples.ravel()).reshape(*samples.shape, self.seq_len + 1)

    def rank_batch(self, step: int, dp_rank: int, dp: int, micro_batch_size: int) -> TokenBatch:
        """Returns one data-parallel rank's micro-batches of a step.

        The global batch is cut into micro-batches in order; micro-batch m of rank r is the
        (m * dp + r)-th.

        Args:
            step: 0-based optimizer step.
            dp_rank: index of the rank among the `dp` data-parallel ranks.
            dp: data-parallel ranks.
            micro_batch_size: sequences a micro-batch.

        Returns:
            tokens [num_microbatches, micro_batch_size, seq_len + 1] and what goes with them
        """
        samples = self._own(step, dp_rank, dp, micro_batch_size)
        tokens = self._samples(samples.ravel()).reshape(*samples.shape, self.seq_len + 1)
        if not self.packed:
            return TokenBatch(tokens=tokens)
        everyone = self.step_samples(step)
        total = len(everyone) * self.seq_len - int(self._start_counts(everyone).sum())
        starts = self._starts(samples.ravel()).reshape(tokens.shape)
        return packed_batch(tokens, starts, float(total))

    def samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns samples of the run by number, [len(samples), seq_len + 1]."""
        return self._samples(samples)

    def starts(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns where documents begin in samples, [len(samples), seq_len + 1]."""
        return self._starts(samples)

    def sources(self, step: int) -> dict[str, int]:
        """Returns how many samples of a step come from where, by name."""
        return {WHOLE_TEXT: len(self.step_samples(step))}

    @abstractmethod
    def held_out_batch(self, max_sequences: int | None = None) -> TokenBatch:
        """Returns the held-out sequences, with their documents where these are packed."""

    def _own(self, step: int, dp_rank: int, dp: int, micro_batch_size: int) -> NDArray[np.int64]:
        """Returns a rank's samples [num_microbatches, micro_batch_size]."""
        everyone = self.step_samples(step)
        assert 0 <= dp_rank < dp
        assert len(everyone) % (dp * micro_batch_size) == 0
        return everyone.reshape(-1, dp, micro_batch_size)[:, dp_rank]

    @abstractmethod
    def _samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the tokens of samples, [len(samples), seq_len + 1]."""

    @abstractmethod
    def _starts(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns where documents begin in samples, [len(samples), seq_len + 1]."""

    def _start_counts(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many documents begin behind each sample's first token."""
        return np.asarray(self._starts(samples)[:, 1:].sum(1), dtype=np.int64)


def packed_batch(
    tokens: NDArray[np.int64], starts: NDArray[np.bool_], total_weight: float | None
) -> TokenBatch:
    """Returns rows whose documents see only themselves.

    Args:
        tokens, starts: [..., seq_len + 1]; no loss is taken of a document's first token.
    """
    own = starts[..., :-1].copy()
    own[..., 0] = True  # what is left of a document that began in another row
    weights = at_document_ends(starts)
    return TokenBatch(tokens=tokens, starts=own, weights=weights, total_weight=total_weight)


@dataclass(frozen=True, slots=True)
class DocumentStarts:
    """Where documents begin in a ring of tokens.

    Attributes:
        places: [documents] int64, ascending.
        size: tokens of the ring.
    """

    places: NDArray[np.int64]
    size: int

    def before(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns how many begin before each position of the ring laid end to end."""
        rounds, inside = np.divmod(positions, self.size)
        return rounds * len(self.places) + np.searchsorted(self.places, inside, "left")

    def counts(self, first: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Returns how many begin among the `length` tokens from each of `first` on."""
        return self.before(first + length) - self.before(first)

    def rows(self, first: NDArray[np.int64], length: int) -> NDArray[np.bool_]:
        """Returns [len(first), length]: whether one begins there."""
        found = np.zeros((len(first), length), dtype=np.bool_)
        begin, end = self.before(first), self.before(first + length)
        for row, at in enumerate(first):
            numbers = np.arange(begin[row], end[row])
            rounds, inside = np.divmod(numbers, len(self.places))
            found[row, self.places[inside] + rounds * self.size - at] = True
        return found


def windows(stream: NDArray[Any], first: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """Returns `length` tokens of a ring from each of `first` on, [len(first), length]."""
    index = (first[:, None] + np.arange(length)) % len(stream)
    return np.asarray(stream[index], dtype=np.int64)


def held_out_rows(
    stream: NDArray[Any], starts: DocumentStarts | None, seq_len: int, most: int | None
) -> TokenBatch:
    """Returns a held-out stream cut in sequences, of more than `most` those evenly over it.

    Args:
        starts: of its documents, where these are packed.
    """
    count = max(1, (len(stream) - 1) // seq_len)
    first = np.arange(count, dtype=np.int64) * seq_len
    if most is not None and most < count:
        first = first[np.arange(most) * count // most]
    tokens = windows(stream, first, seq_len + 1)
    if starts is None:
        return TokenBatch(tokens=tokens)
    return packed_batch(tokens, starts.rows(first, seq_len + 1), None)
