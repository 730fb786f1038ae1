"""Rounds in which an attempt counts only when its verdict is there."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.plan.rollout import stop_count
from flopwright.simulator.rollouts.rewards import queue_ends
from flopwright.simulator.rollouts.rounds import simulate, simulate_rounds
from flopwright.simulator.rollouts.state import KINDS
from flopwright.spec.rollout import RolloutScenario


def _round(reward, **changes):
    stop = {"rewarded": True} | changes.pop("stop", {})
    plain = {
        "name": "judged",
        "prompts": 12,
        "samples_per_prompt": 4,
        "lengths": {"kind": "exponential", "mean": 100},
        "lambda": 0.75,
        "decode": {"per_step": "10 ms", "per_attempt": "1 ms"},
        "instances": 2,
        "reward": reward,
        "stop": stop,
    }
    return RolloutScenario.model_validate(plain | changes)


def _events(record, kind):
    log = record.phase.log
    chosen = log.kind == KINDS.index(kind)
    return log.time_s[chosen], log.attempt[chosen]


def test_a_judge_delays_the_stop_by_a_queue_worked_out_by_hand():
    judge = {
        "kind": "judge", "workers": 3, "read_tokens": 50, "verdict_tokens": 200,
        "read_tokens_per_s": 1000, "verdict_tokens_per_s": 100,
    }  # fmt: skip
    scenario = _round(judge)
    record = simulate_rounds(scenario, 1, 5, log=True, debug=True)[0]
    done_s, ids = _events(record, "finish")
    totals = {}
    unjudged = simulate_rounds(scenario.model_copy(update={"stop_fraction": 1.0}), 1, 5, log=True)
    for attempt, tokens in zip(range(48), unjudged[0].lengths.tolist(), strict=True):
        totals[attempt] = tokens
    seconds = np.array([(50 + totals[i]) / 1000 + 2.0 for i in ids.tolist()])
    ends = queue_ends(done_s, seconds, [0.0] * 3)
    needed = stop_count(48, 0.75)
    assert record.phase.end_s == pytest.approx(sorted(ends)[needed - 1])
    assert record.metrics.completed == needed
    assert record.metrics.time_s["reward"] == 0  # it is part of generation
    verdicts_s, judged = _events(record, "verdict")
    assert len(judged) == needed
    assert record.finish_s.tolist() == verdicts_s.tolist()


def test_a_slow_judge_sets_the_pace_whatever_the_engines_do():
    # One worker, 5 s a verdict: no more than one attempt counts every 5 s (work conserved).
    slow = {"kind": "program", "time": {"mean": "5 s"}, "workers": 1}
    report = simulate(_round(slow), rounds=6, seed=1)
    assert report.attempts_per_s == pytest.approx(1 / 5, rel=0.02)
    free = simulate(_round(slow | {"workers": 1000}), rounds=6, seed=1)
    assert free.attempts_per_s > 5 * report.attempts_per_s


def test_without_time_verdicts_change_nothing():
    instant = _round({"kind": "program", "time": {"mean": "0 s"}, "workers": 1})
    after = instant.stop.model_copy(update={"rewarded": False})
    plain = instant.model_copy(update={"stop": after})
    for seed in range(3):
        a = simulate_rounds(instant, 4, seed)
        b = simulate_rounds(plain, 4, seed)
        assert [r.metrics.round_time_s for r in a] == [r.metrics.round_time_s for r in b]
        assert [r.lengths.tolist() for r in a] == [r.lengths.tolist() for r in b]


@pytest.mark.parametrize("loop", ["simpy", "compiled"])
def test_a_tournament_counts_whole_prompts_after_their_last_comparison(loop):
    reward = {
        "kind": "tournament", "verdict_tokens": 100, "verdict_tokens_per_s": 50,
        "pairs_per_prompt": 5, "workers": 2,
    }  # fmt: skip
    scenario = _round(reward, prompts=4, stop={"count": "groups"})
    record = simulate_rounds(scenario, 1, 2, loop=loop, log=True, debug=True)[0]
    done_s, ids = _events(record, "finish")
    verdicts_s, judged = _events(record, "verdict")
    assert record.metrics.completed == 3 * 4
    free = [0.0, 0.0]
    for prompt in dict.fromkeys((judged // 4).tolist()):
        mine = np.isin(ids, 4 * prompt + np.arange(4))
        assert mine.sum() == 4
        lengths = record.lengths[np.flatnonzero(np.unique(judged) // 4 == prompt)]
        each_s = 2.0 + 2 * lengths.mean() / 10_000
        ends = queue_ends(np.full(5, done_s[mine].max()), np.full(5, each_s), free)
        assert verdicts_s[judged // 4 == prompt] == pytest.approx([ends.max()] * 4)


def test_littles_law_holds_with_verdicts_in_flight():
    # Attempts that wait for a verdict are in flight: E[J] = 1 / lambda all the same.
    slow = {"kind": "program", "time": {"kind": "exponential", "mean": "2 s"}, "workers": 8}
    scenario = _round(slow, ties="strict", prompts=24)
    records = simulate_rounds(scenario, 160, 3)[20:]
    spans = np.concatenate([r.rounds_in_flight for r in records])
    assert spans.mean() == pytest.approx(96 / stop_count(96, 0.75), rel=0.02)
    assert all(r.metrics.completed == 72 for r in records)


def test_verdicts_that_are_under_way_at_the_end_go_on_beside_the_update():
    slow = {"kind": "program", "time": {"mean": "30 s"}, "workers": 100}
    scenario = _round(slow, update="100 s", ties="strict")
    first, second = simulate_rounds(scenario, 2, 0, debug=True)
    waiting = 48 - first.metrics.completed - int((first.lengths < 0).sum())
    assert waiting == 12
    # They were judged while the update ran: they are there when the next round begins.
    assert (second.finish_s == 0).sum() >= 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reward": {"kind": "none"}}, "give a reward"),
        ({"reward": {"kind": "tournament"}}, r"stop\.count must be groups"),
        (
            {"stop": {"rule": "token_budget", "tokens": 9, "rewarded": True}, "lambda": 1},
            "rewarded must be false",
        ),
    ],
)
def test_what_cannot_wait_for_verdicts_is_refused(changes, words):
    reward = changes.pop("reward", {"kind": "program", "time": {"mean": "1 s"}})
    with pytest.raises(ValueError, match=words):
        _round(reward, **changes)
