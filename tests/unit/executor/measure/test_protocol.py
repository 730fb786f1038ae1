from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwright.executor.measure.protocol import Turn, noise_floor, summarise, turns


def test_plans_take_turns() -> None:
    assert list(turns(2, 5, 2)) == [
        Turn(0, 0, 0, 2),
        Turn(0, 1, 0, 2),
        Turn(1, 0, 2, 2),
        Turn(1, 1, 2, 2),
        Turn(2, 0, 4, 1),
        Turn(2, 1, 4, 1),
    ]


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 9))
def test_every_plan_makes_every_step_once(entries: int, steps: int, per_round: int) -> None:
    for entry in range(entries):
        mine = [t for t in turns(entries, steps, per_round) if t.entry == entry]
        assert [s for t in mine for s in range(t.first_step, t.first_step + t.num_steps)] == list(
            range(steps)
        )


def test_a_plans_time_is_the_median_of_round_medians() -> None:
    rounds = [[9.0, 9.0], [1.0, 2.0, 30.0], [4.0, 4.0, 4.0], [3.0]]
    times = summarise(rounds)
    assert times.step_time_s == 3.0  # of 2, 4, 3
    assert times.samples_s == (1.0, 2.0, 30.0, 4.0, 4.0, 4.0, 3.0)
    assert times.discarded_steps == 2
    assert times.p10_s == pytest.approx(np.percentile(times.samples_s, 10))
    assert times.p90_s == pytest.approx(np.percentile(times.samples_s, 90))


def test_a_run_of_one_round_keeps_it() -> None:
    assert summarise([[2.0, 3.0]]).samples_s == (2.0, 3.0)
    assert summarise([[2.0, 3.0]]).discarded_steps == 0


def test_noise_floor_is_the_spread_of_equal_plans() -> None:
    assert noise_floor([1.0]) is None
    assert noise_floor([2.0, 2.1, 1.9]) == pytest.approx(2.1 / 1.9 - 1)
