"""Scores against hand-worked numbers and scipy's rank correlation."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from flopwright.simulator.accuracy.score import (
    Scored,
    macro,
    mean_ranks,
    score,
    spearman,
    sweep_spearman,
    under_by_5_percent_share,
)


def run(measured: float, predicted: float, cell: str = "a", sweep: str = "") -> Scored:
    return Scored(
        id="x",
        measured=measured,
        predicted=predicted,
        low=predicted * 0.9,
        high=predicted * 1.1,
        labels={},
        cell=cell,
        sweep=sweep,
    )


def test_errors_of_four_runs_by_hand() -> None:
    # +10 %, -20 %, +5 %, 0 %: absolute 0, 5, 10, 20; the 0.9 quantile lies at 2.7 of 0..3.
    found = score([run(10, 11), run(10, 8), run(20, 21), run(4, 4)], in_scope=5)
    assert found.n == 4
    assert found.coverage == pytest.approx(0.8)
    assert found.median_abs_error == pytest.approx(0.075)
    assert found.p90_abs_error == pytest.approx(0.10 + 0.7 * 0.10)
    assert found.bias == pytest.approx(0.025)
    # 10 in 9.9..12.1, 10 not in 7.2..8.8, 20 in 18.9..23.1, 4 in 3.6..4.4
    assert found.interval80_coverage == pytest.approx(0.75)


def test_a_cell_counts_once_however_many_runs_it_has() -> None:
    runs = [run(1, 1.02, "a")] * 50 + [run(1, 1.2, "b"), run(1, 1.4, "b"), run(1, 0.9, "c")]
    found = macro(runs)
    assert found.cells == 3
    assert found.median_abs_error == pytest.approx(0.1)  # of 0.02, 0.3, 0.1
    assert found.p90_abs_error == pytest.approx(0.1 + 0.8 * 0.2)


def test_a_group_without_runs_has_no_numbers() -> None:
    found = score([], in_scope=3)
    assert (found.n, found.coverage, found.median_abs_error, found.spearman) == (
        0,
        0.0,
        None,
        None,
    )
    assert macro([]).median_abs_error is None
    assert under_by_5_percent_share([]) is None


def test_ranks_are_taken_within_a_sweep_only() -> None:
    rising = [run(k, 10 * k, sweep="one") for k in (1, 2, 3, 4)]
    falling = [run(k, 5 - k, sweep="two") for k in (1, 2, 3, 4)]
    short = [run(1, 2, sweep="three"), run(2, 1, sweep="three")]
    repeats = [run(k, 3.0, sweep="four") for k in (1, 2, 3, 4, 5)]
    every = rising + falling + short + repeats
    assert sweep_spearman(every, lambda r: r.sweep) == pytest.approx(0.0)  # median of 1 and -1
    assert sweep_spearman([run(1, 1), run(2, 2)], lambda r: r.sweep) is None
    assert score(rising).spearman_one_batch == pytest.approx(1.0)
    assert score([*rising, run(9, 1.0)]).spearman == pytest.approx(0.0)  # 1, 2, 3, 4, 0


def test_under_estimates_beyond_five_percent() -> None:
    assert under_by_5_percent_share([run(100, 94), run(100, 96), run(100, 120)]) == pytest.approx(
        1 / 3
    )


values = st.lists(st.integers(0, 6).map(float), min_size=3, max_size=12)


@given(values)
def test_spearman_is_scipys(a: list[float]) -> None:
    b = [
        v + shift
        for v, shift in zip(a, np.random.default_rng(len(a)).normal(size=len(a)) * 3, strict=True)
    ]
    mine = spearman(a, b)
    if len(set(a)) == 1:
        assert mine is None
    else:
        assert mine == pytest.approx(float(scipy.stats.spearmanr(a, b).statistic), abs=1e-12)


@given(values)
def test_mean_ranks_are_scipys(a: list[float]) -> None:
    assert mean_ranks(np.array(a)) == pytest.approx(scipy.stats.rankdata(a) - 1)
