"""Samples that a run leaves out: the data of a loss spike, once it has gone back to before it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Samples first .. end - 1 by number, in order and apart from each other.
Spans = tuple[tuple[int, int], ...]


def kept_samples(numbers: NDArray[np.int64], skipped: Spans) -> NDArray[np.int64]:
    """Returns which samples the n-th kept ones are: those outside the spans, in their order.

    Args:
        numbers: positions in the order of kept samples, from 0.
    """
    for first, end in skipped:
        numbers = np.where(numbers >= first, numbers + (end - first), numbers)
    return numbers


def with_kept_skipped(skipped: Spans, first: int, end: int) -> Spans:
    """Returns the spans after kept samples first .. end - 1 (by position) are left out too."""
    assert first < end
    numbers = kept_samples(np.array([first, end - 1], dtype=np.int64), skipped)
    begin, stop = int(numbers[0]), int(numbers[1]) + 1
    apart = [span for span in skipped if span[1] < begin or span[0] > stop]
    touched = [span for span in skipped if not (span[1] < begin or span[0] > stop)]
    begin = min([begin, *(a for a, _ in touched)])
    stop = max([stop, *(b for _, b in touched)])
    return tuple(sorted([*apart, (begin, stop)]))
