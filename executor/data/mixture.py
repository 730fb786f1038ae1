"""Which domain each sample of a run is from, and which of the domain's.

Every thousand samples hold each domain exactly by its weight, in an order that seed and number
of the thousand fix. So sample g of the run is known without those before it: nothing has to be
remembered to go on at any step, and no plan changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.executor.data.batches import DataMeta, Dataset
from flopwright.executor.data.domains import BLOCK
from flopwright.executor.data.order import Ordered
from flopwright.executor.data.skips import Spans
from flopwright.executor.data.stream import StreamedDataset, StreamMeta
from flopwright.executor.data.token_batch import TokenBatch, joined
from flopwright.spec.phases import BatchLevel

Part = Dataset | StreamedDataset
Meta = DataMeta | StreamMeta

# Beside seed and number of the block, so that no other order is drawn from the same numbers.
_STREAM: Final = 0x6D6978


@lru_cache(maxsize=256)
def _block(shares: tuple[int, ...], seed: int, number: int) -> tuple[NDArray[np.int64], ...]:
    """Returns (domain, how many of that domain before it in the block) by place in a block."""
    raw = np.random.PCG64(np.random.SeedSequence([seed, _STREAM, number])).random_raw(BLOCK)
    order = np.argsort(raw, kind="stable")
    domains = np.repeat(np.arange(len(shares)), shares)[order]
    before = np.zeros(BLOCK, dtype=np.int64)
    for domain, share in enumerate(shares):
        before[domains == domain] = np.arange(share)
    return domains, before


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedDataset(Ordered):
    """Prepared domains and the order in which a workload reads them.

    Attributes:
        parts: the domains, each in an order of its own.
        shares: samples of each in a block; names: of the domains.
        meta: of the first; all have the same tokenizer.
    """

    folder: Path
    meta: Meta
    parts: tuple[Part, ...]
    shares: tuple[int, ...]
    seq_len: int
    global_batch_size: int
    seed: int
    ramp: tuple[BatchLevel, ...] = ()
    skipped: Spans = ()
    names: tuple[str, ...] = ()

    @property
    def packed(self) -> bool:
        """Whether documents of a row see only themselves."""
        return self.parts[0].packed

    def sources(self, step: int) -> dict[str, int]:
        """Returns how many samples of a step are of which domain."""
        domains, _ = self.places(self.step_samples(step))
        counts = np.bincount(domains, minlength=len(self.parts)).tolist()
        return dict(zip(self.names, counts, strict=True))

    def places(self, samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the domain of samples of the run, and which sample of the domain each is."""
        numbers, within = np.divmod(samples, BLOCK)
        domains, places = np.empty_like(samples), np.empty_like(samples)
        for number in np.unique(numbers):
            here = numbers == number
            of, before = _block(self.shares, self.seed, int(number))
            domains[here] = of[within[here]]
            places[here] = before[within[here]]
        return domains, places + numbers * np.array(self.shares)[domains]

    def _samples(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        domains, places = self.places(samples)
        rows = np.empty((len(samples), self.seq_len + 1), dtype=np.int64)
        for number, part in enumerate(self.parts):
            here = domains == number
            if here.any():
                rows[here] = part.samples(places[here])
        return rows

    def _starts(self, samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        domains, places = self.places(samples)
        rows = np.empty((len(samples), self.seq_len + 1), dtype=np.bool_)
        for number, part in enumerate(self.parts):
            here = domains == number
            if here.any():
                rows[here] = part.starts(places[here])
        return rows

    def held_out_sequences(self, max_sequences: int | None = None) -> NDArray[np.int64]:
        """Returns the domains' held-out sequences [count, seq_len + 1], by weight where cut."""
        return self.held_out_batch(max_sequences).tokens

    def held_out_batch(self, max_sequences: int | None = None) -> TokenBatch:
        """Returns the same, with their documents where these are packed."""
        found = []
        for part, share in zip(self.parts, self.shares, strict=True):
            if share:
                limit = None if max_sequences is None else max(1, max_sequences * share // BLOCK)
                found.append(part.held_out_batch(limit))
        return joined(found)
