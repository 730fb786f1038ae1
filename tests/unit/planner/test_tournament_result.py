"""The outcome of turns: regret, rank correlation, noise floor."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.tournament import Contender, Refused, twin_of
from flopwright.planner.tournament_result import TournamentResult, result_of, spearman
from flopwright.planner.tournament_times import TurnTime

TRUTH = {"a": 1.0, "b": 1.04, "c": 1.3, "d": 2.0}
PREDICTED = {"a": 1.1, "b": 1.0, "c": 1.4, "d": 1.9}
PRIOR = {"a": 0.4, "b": 0.5, "c": 0.3, "d": 0.6}


def contender(name: str) -> Contender:
    return Contender(
        name=name,
        plan=ParallelPlan(dp_shard=2, micro_batch_size=1 + ord(name) - ord("a")),
        origins=("top",),
        prior_step_s=PRIOR[name],
        predicted_step_s=PREDICTED[name],
    )


def turns(rounds: int = 9, noise: float = 0.0, seed: int = 0) -> list[TurnTime]:
    rng = np.random.default_rng(seed)
    truth = TRUTH | {twin_of("b"): TRUTH["b"] * 1.01}
    return [
        TurnTime(launch=1, round=r, plan=n, step_s=s * math.exp(rng.normal(0, noise)))
        for r in range(rounds)
        for n, s in truth.items()
    ]


def outcome(found: list[TurnTime], **changes: object) -> TournamentResult:
    values: dict[str, object] = {
        "scenario": "s",
        "seed": 0,
        "chosen": "b",
        "uncalibrated": "c",
        "calibration_id": "cal-1",
        "left": {"d": "100% slower than a"},
        "refused": (Refused(name="e", reason="not run here"),),
        "finished": True,
        **changes,
    }
    return result_of([contender(n) for n in TRUTH], found, **values)  # type: ignore[arg-type]


def test_regret_is_measured_chosen_over_measured_best() -> None:
    result = outcome(turns())
    assert result.best == "a"
    both = 1.04 * math.sqrt(1.01) - 1  # of both entries together
    assert result.regret == pytest.approx(both)
    assert result.uncalibrated.regret == pytest.approx(0.3)
    assert result.noise_floor == pytest.approx(0.01)
    assert result.regret_crossed == pytest.approx(both)
    assert [r.name for r in result.plans] == ["a", "b", "c", "d"]
    assert [r.behind for r in result.plans] == pytest.approx([0, both, 0.3, 1.0])
    assert result.plans[3].left == "100% slower than a"
    assert result.good
    assert result.spearman == pytest.approx(0.8)
    assert result.uncalibrated.spearman == pytest.approx(0.4)
    assert result.calibrated.median_error == pytest.approx((0.05 + 0.1 / 1.3) / 2)
    assert TournamentResult.model_validate(result.to_data()) == result


def test_the_best_itself_has_no_regret() -> None:
    assert outcome(turns(), chosen="a").regret == 0.0
    assert outcome(turns(), chosen="a").noise_floor is None  # no twin of it ran


def test_far_off_and_beyond_the_noise_is_not_good() -> None:
    assert not outcome(turns(), chosen="d").good


@pytest.mark.slow
def test_a_lucky_best_is_unmasked_by_the_other_half_of_the_rounds() -> None:
    """Among equal plans the fastest one is luck: crossed regrets are 0 in the mean."""
    plain, crossed = [], []
    for seed in range(200):
        rng = np.random.default_rng(seed)
        found = [
            TurnTime(launch=1, round=r, plan=n, step_s=math.exp(rng.normal(0, 0.05)))
            for r in range(9)
            for n in TRUTH
        ]
        result = outcome(found)
        assert result.regret_crossed is not None
        plain.append(result.regret)
        crossed.append(result.regret_crossed)
    sigma = float(np.std(crossed)) / math.sqrt(200)
    assert abs(float(np.mean(crossed))) < 5 * sigma
    assert float(np.mean(plain)) > 5 * sigma


@pytest.mark.slow
def test_the_luck_of_launches_is_left_out_too() -> None:
    """Equal plans, each moved by 10 % in a launch: crossed by launch no regret is left."""
    plain, crossed = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        found = []
        for launch in range(3):
            luck = {n: math.exp(rng.normal(0, 0.1)) for n in (*TRUTH, twin_of("b"))}
            found += [
                TurnTime(launch=launch, round=r, plan=n, step_s=s * math.exp(rng.normal(0, 0.02)))
                for r in range(4)
                for n, s in luck.items()
            ]
        result = outcome(found, left={})
        assert result.regret_crossed is not None
        plain.append(result.regret)
        crossed.append(result.regret_crossed)
    sigma = float(np.std(crossed)) / math.sqrt(60)
    # a mean of ratios of two lucks of 10 % is 1 % above 1
    assert abs(float(np.mean(crossed)) - 0.01) < 3 * sigma
    assert float(np.mean(plain)) > 0.03


def test_plans_without_a_turn_are_left_out() -> None:
    result = outcome([t for t in turns() if t.plan != "d"])
    assert [r.name for r in result.plans] == ["a", "b", "c"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=20))
def test_rank_correlation_is_scipys(pairs: list[tuple[int, int]]) -> None:
    a, b = [float(x) for x, _ in pairs], [float(y) for _, y in pairs]
    if len(set(a)) < 2 or len(set(b)) < 2:
        assert spearman(a, b) == 0.0
    else:
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_who_left_early_is_not_the_best_whatever_few_turns_say() -> None:
    """A plan that was fast in its two turns of the heat, and clearly slower when it raced."""
    found = [t for t in turns() if t.plan != "a"]
    found += [TurnTime(launch=1, round=r, plan="a", step_s=0.5) for r in (1, 2)]
    assert outcome(found).best == "a"
    result = outcome(found, left={"a": "40% slower than b"})
    assert result.best == "b"
    assert result.regret == 0.0


def test_the_floor_is_what_twins_differ_by_in_the_mean_of_launches() -> None:
    """Memory lies anew in each launch: the twin is ahead in one and behind in the next."""
    lucky = {1: 1.1, 2: 1 / 1.1, 3: 1.1}
    found = [
        TurnTime(launch=launch, round=r, plan=n, step_s=s)
        for launch, more in lucky.items()
        for r in range(5)
        for n, s in (TRUTH | {twin_of("b"): TRUTH["b"] * more}).items()
    ]
    # the three differences are all 10 %: that of their mean is expected to be 10 % / sqrt(3)
    assert outcome(found).noise_floor == pytest.approx(1.1 ** (1 / math.sqrt(3)) - 1)
    same = [t for t in found if t.launch != 2]
    assert outcome(same).noise_floor == pytest.approx(0.1)
