"""How much of causal attention documents leave: counted pair by pair, and sampled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from flopwright.spec.load import load_scenario
from flopwright.spec.packing import DocumentLength, Packing, causal_share
from flopwright.spec.phases import BatchRamp, batch_at, batch_levels

MINI = load_scenario("kimi_k2_mini_2cpu_fp32").workload


def seen_one_by_one(length: int, seq_len: int, window: int | None) -> float:
    """Mean tokens that a token sees, over its place in the document and in the row."""
    most = seq_len if window is None else window
    seen = [min(i, j, most - 1) + 1 for i in range(seq_len) for j in range(length)]
    return sum(seen) / len(seen)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=4),
    st.integers(1, 25),
    st.one_of(st.none(), st.integers(1, 30)),
)
def test_share_is_that_of_pairs_counted_one_by_one(
    lengths: list[tuple[int, int]], seq_len: int, window: int | None
) -> None:
    tokens = sum(n * share for n, share in lengths)
    seen = sum(seen_one_by_one(n, seq_len, window) * n * share for n, share in lengths) / tokens
    w = seq_len if window is None else min(window, seq_len)
    alone = (w * (w + 1) / 2 + (seq_len - w) * w) / seq_len
    weighed = [(n, float(share)) for n, share in lengths]
    assert causal_share(weighed, seq_len, window) == pytest.approx(seen / alone, rel=1e-12)


def test_share_is_what_packed_rows_have_on_average() -> None:
    rng, seq_len = np.random.default_rng(0), 64
    lengths = rng.choice([10, 40, 200], 20_000, p=[0.6, 0.3, 0.1])
    ends = np.cumsum(lengths)
    pairs = 0
    rows = ends[-1] // seq_len
    for row in range(rows):
        inside = ends[(ends > row * seq_len) & (ends < (row + 1) * seq_len)]
        cuts = np.array([row * seq_len, *inside, (row + 1) * seq_len])
        parts = np.diff(cuts)
        pairs += (parts * (parts + 1) // 2).sum()
    found = pairs / rows / (seq_len * (seq_len + 1) / 2)
    wanted = causal_share([(10, 0.6), (40, 0.3), (200, 0.1)], seq_len)
    assert found == pytest.approx(wanted, rel=0.01)
    assert causal_share([], seq_len) == 1.0
    assert causal_share([(10**9, 1.0)], seq_len) == pytest.approx(1.0, rel=1e-6)


def test_a_workload_without_packing_is_written_as_before() -> None:
    assert "packing" not in MINI.to_data()
    packed = MINI.model_copy(update={"packing": Packing()})
    assert packed.to_data()["packing"] == {"lengths": []}
    lengths = [DocumentLength(tokens=512, share=3), DocumentLength(tokens=64, share=1)]
    data = MINI.to_data() | {"packing": Packing(lengths=tuple(lengths)).to_data()}
    assert type(MINI).model_validate(data).packing == Packing(lengths=tuple(lengths))
    for wrong in (
        {"tokens": 0, "share": 1},
        {"tokens": 8, "share": 0},
        {"tokens": 8, "share": 1e308},
        {"tokens": 8},
    ):
        with pytest.raises(ValidationError):
            Packing.model_validate({"lengths": [wrong]})


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 300))
def test_steps_of_a_ramp_read_sample_after_sample(
    start: int, increment: int, increments: int, tokens: int
) -> None:
    full, seq_len = start + increment * increments, 3
    ramp = BatchRamp(start=start, increment=increment, tokens=tokens)
    levels = batch_levels(seq_len, full, tokens + 10 * full * seq_len, ramp)
    steps = sum(level.steps for level in levels) + 3  # behind the budget the batch is full
    at = 0
    for step in range(steps):
        first, batch = batch_at(levels, seq_len, step)
        assert first == at
        assert start <= batch <= full
        at += batch
    assert batch == full
