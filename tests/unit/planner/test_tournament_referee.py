"""Races whose truth is known: the fastest must stay, and the time must go to contenders."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flopwright.planner.tournament_referee import Decision, Rules, decide, worth_racing
from flopwright.planner.tournament_times import TurnTime, kept_turns, paired_times


def race(
    truth: dict[str, float], rules: Rules, seed: int = 0, noise: float = 0.03
) -> tuple[list[TurnTime], dict[str, str], float]:
    """Plays a race turn by turn; returns its turns, who left, and when it ended."""
    rng = np.random.default_rng(seed)
    turns: list[TurnTime] = []
    retired: dict[str, str] = {}
    clock = 0.0
    for number in range(1000):
        mood, out = math.exp(rng.normal(0, 0.2)), set(retired)
        for name, seconds in truth.items():
            if name in out:
                continue
            step_s = seconds * mood * math.exp(rng.normal(0, noise))
            clock += step_s * rules.steps_per_turn
            turns.append(TurnTime(launch=1, round=number, plan=name, step_s=step_s))
            decision = decide(rules, turns, retired, clock)
            retired |= decision.retired
            if decision.stop:
                return turns, retired, clock
    raise AssertionError("a race has an end")


FIELD = {f"p{i}": 1.0 + 0.1 * i for i in range(10)}


def rules(**changes: object) -> Rules:
    values: dict[str, object] = {
        "names": tuple(FIELD),
        "stay": frozenset({"p5"}),
        "budget_s": 200.0,
        **changes,
    }
    return Rules(**values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_fastest_and_those_who_must_stay_run_to_the_end() -> None:
    for seed in range(20):
        turns, retired, clock = race(FIELD, rules(), seed)
        assert "p0" not in retired
        assert "p5" not in retired
        times = paired_times(kept_turns(turns))
        assert times.ratio(times.fastest(FIELD), "p0") == pytest.approx(1.0, abs=0.03)
        assert clock < 200.0 + 2 * sum(FIELD.values()) * 2


def test_most_time_goes_to_contenders() -> None:
    turns, retired, _ = race(FIELD, rules())
    count = {n: sum(t.plan == n for t in turns) for n in FIELD}
    assert count["p0"] > 3 * count["p9"]
    assert "slower than p0" in retired["p9"]
    # Far behind is seen after one turn that counts, anything less needs two.
    assert all(count[n] >= (2 if FIELD[n] > 1.25 else 3) for n in FIELD)


def test_equal_plans_are_halved_when_the_time_goes_by() -> None:
    equal = dict.fromkeys(FIELD, 1.0)
    turns, retired, _ = race(equal, rules())
    assert 5 <= len(retired) <= 7
    assert all("not among the best" in why for why in retired.values())
    assert "p5" not in retired
    assert len({t.round for t in turns}) > 200 / 2 / 10  # rounds became shorter


def test_who_uses_up_the_time_of_a_trial_leaves_even_if_it_should_stay() -> None:
    slow = FIELD | {"p5": 40.0}
    turns, retired, _ = race(slow, rules(timeout_s=100.0))
    assert "100 s of a trial" in retired["p5"]
    assert sum(t.plan == "p5" for t in turns) <= 2


def test_a_race_ends_after_its_rounds() -> None:
    turns, _, _ = race(FIELD, rules(max_rounds=4, budget_s=1e9))
    assert {t.round for t in turns} == {0, 1, 2, 3}


def test_nothing_is_decided_in_the_middle_of_a_round() -> None:
    turns = [
        TurnTime(launch=1, round=r, plan=n, step_s=s) for r in range(3) for n, s in FIELD.items()
    ]
    assert decide(rules(), turns[:-1], {}, 5.0) == Decision(retired={}, stop=False)
    assert decide(rules(), turns, {}, 5.0).retired


def test_who_was_far_behind_in_the_heat_need_not_race() -> None:
    heat = [
        TurnTime(launch=1, round=r, plan=n, step_s=s * (1 + 0.01 * (r % 3)))
        for r in range(5)
        for n, s in {"a": 2.5, "b": 1.0, "c": 1.1, "d": 3.0, "other": 0.1}.items()
    ]
    gone = worth_racing(["a", "b", "c", "d"], heat)
    assert set(gone) == {"a", "d"}
    assert "slower than b in the heat" in gone["a"]
    # Two race even if one of them is far behind: they tie heat and race together.
    assert set(worth_racing(["a", "b", "d"], heat)) == {"d"}
    assert worth_racing(["a", "b"], []) == {}
