"""Kept samples are the numbers outside the spans, in order."""

from __future__ import annotations

from itertools import count, islice, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flopwright.executor.data.skips import Spans, kept_samples, with_kept_skipped

WINDOWS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), max_size=6)


def kept(skipped: Spans, how_many: int) -> list[int]:
    """Returns the first kept numbers, by looking at each."""
    return list(islice((n for n in count() if not any(a <= n < b for a, b in skipped)), how_many))


@given(WINDOWS)
def test_each_window_goes_and_what_is_behind_moves_up(windows: list[tuple[int, int]]) -> None:
    spans: Spans = ()
    left = list(range(200))
    for first, length in windows:
        spans = with_kept_skipped(spans, first, first + length)
        gone = left[first : first + length]
        # what was left out in between stays left out
        del left[first : first + length]
        assert all(any(a <= n < b for a, b in spans) for n in gone)
        assert all(a < b for a, b in spans)
        assert all(b < c for (_, b), (c, _) in pairwise(spans))
        assert kept_samples(np.arange(100), spans).tolist() == left[:100] == kept(spans, 100)


def test_nothing_left_out_changes_nothing() -> None:
    numbers = np.array([3, 0, 7])
    assert kept_samples(numbers, ()).tolist() == [3, 0, 7]
    assert kept_samples(numbers, ((0, 2), (5, 6))).tolist() == [6, 2, 10]
