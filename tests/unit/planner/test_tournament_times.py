"""Plans that take turns on a machine with moods: their ratios must come out, not the moods."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.planner.tournament_times import TurnTime, kept_turns, paired_times

TRUTH = {"a": 1.0, "b": 1.1, "c": 1.5, "d": 0.9}


def turns_of(
    seed: int,
    *,
    rounds: int = 8,
    noise: float = 0.02,
    moods: float = 0.5,
    present: dict[str, range] | None = None,
    late: int = 0,
) -> list[TurnTime]:
    """Rounds whose pace varies by a factor exp(moods), turns that scatter by `noise`."""
    rng = np.random.default_rng(seed)
    paces = np.exp(rng.normal(0, moods, rounds))
    turns = [
        TurnTime(
            launch=1,
            round=r,
            plan=plan,
            step_s=float(paces[r] * truth * math.exp(rng.normal(0, noise))),
        )
        for r in range(rounds)
        for plan, truth in TRUTH.items()
        if present is None or r in present.get(plan, range(rounds))
    ]
    for i in rng.choice(len(turns), late, replace=False):
        turns[i] = TurnTime(
            launch=1, round=turns[i].round, plan=turns[i].plan, step_s=4 * turns[i].step_s
        )
    return turns


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_ratios_are_found_whatever_the_machine_did(seed: int) -> None:
    times = paired_times(turns_of(seed))
    for plan, truth in TRUTH.items():
        off = math.log(times.ratio(plan, "a") / (truth / TRUTH["a"]))
        assert abs(off) < 5 * times.ratio_log_std(plan, "a")
        assert abs(off) < 0.05
    assert times.fastest(TRUTH) == "d"
    assert 0.01 < times.scatter_log < 0.04


def test_without_noise_and_moods_the_times_themselves_come_out() -> None:
    times = paired_times(turns_of(0, noise=0.0, moods=0.0))
    for plan, truth in TRUTH.items():
        assert times.plans[plan].step_s == pytest.approx(truth, rel=1e-9)
        assert times.plans[plan].turns == 8


def test_late_turns_count_little() -> None:
    for seed in range(20):
        times = paired_times(turns_of(seed, late=3))
        assert times.ratio("c", "a") == pytest.approx(1.5, rel=0.06)
        assert times.ratio("d", "b") == pytest.approx(0.9 / 1.1, rel=0.06)


def test_who_left_early_is_compared_in_the_rounds_both_were_in() -> None:
    """The first rounds are four times as slow: a plain median would double c's time."""
    present = {"c": range(3)}
    turns = [
        TurnTime(launch=1, round=t.round, plan=t.plan, step_s=t.step_s * (4 if t.round < 3 else 1))
        for t in turns_of(1, moods=0.0, present=present)
    ]
    times = paired_times(turns)
    assert times.ratio("c", "a") == pytest.approx(1.5, rel=0.05)
    assert times.plans["c"].log_std > times.plans["a"].log_std


def test_launches_are_tied_by_the_plans_they_share() -> None:
    first = [t for t in turns_of(2, moods=0.0) if t.plan in "ab"]
    second = [
        TurnTime(launch=2, round=t.round, plan=t.plan, step_s=1.7 * t.step_s)
        for t in turns_of(3, moods=0.0)
        if t.plan in "bcd"
    ]
    times = paired_times([*first, *second])
    assert times.ratio("c", "a") == pytest.approx(1.5, rel=0.05)


def test_two_turns_of_two_plans_are_not_taken_for_certain() -> None:
    """Two plans in one round fit without a residual; their noise is not zero for that."""
    times = paired_times(
        [TurnTime(launch=1, round=1, plan=p, step_s=s) for p, s in (("a", 1.0), ("b", 1.02))]
    )
    assert times.ratio_log_std("a", "b") > 0.02


def test_the_first_round_of_each_launch_is_a_warm_up() -> None:
    turns = turns_of(0)
    assert {t.round for t in kept_turns(turns)} == set(range(1, 8))
    only = [TurnTime(launch=1, round=0, plan="e", step_s=1.0)]
    assert only[0] in kept_turns([*turns, *only])
