"""A round as a Chrome trace: nothing overlaps on a lane, and it says what the round says."""

from __future__ import annotations

import itertools
import json

import pytest

from flopwright.simulator.rollouts.figure import round_png
from flopwright.simulator.rollouts.figure_cache import cache_over_time
from flopwright.simulator.rollouts.report import round_report
from flopwright.simulator.rollouts.round_trace import round_trace
from flopwright.simulator.rollouts.rounds import simulate_rounds
from flopwright.spec.rollout import RolloutScenario

SCENARIO = RolloutScenario.model_validate(
    {
        "name": "t",
        "prompts": 8,
        "samples_per_prompt": 2,
        "prompt_tokens": 8,
        "lengths": {"kind": "lognormal", "mean": 120, "sigma": 0.7, "cap": 400},
        "lambda": 0.8,
        "instances": 2,
        "decode": {"per_step": "10 ms", "per_attempt": "50 us"},
        "prefill": {"per_token": 1e-5},
        "kv": {"per_token": "1 KiB", "capacity": "800 KiB"},
        "update": "2 s",
        "agent": {
            "tokens_per_turn": 40,
            "tool_tokens": {"kind": "deterministic", "tokens": 4},
            "tool_time": {"kind": "exponential", "mean": "0.5 s"},
            "max_context": 600,
        },
    }
)


@pytest.fixture(scope="module")
def record():
    return simulate_rounds(SCENARIO, 3, 0, log=True)[-1]


@pytest.fixture(scope="module")
def events(record):
    return json.loads(json.dumps(round_trace(record, name="t")))["traceEvents"]


def test_phases_follow_each_other_and_sum_to_the_round(record, events):
    phases = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert [e["name"] for e in phases] == ["generation", "update"]
    assert phases[1]["ts"] == pytest.approx(phases[0]["dur"])
    assert sum(e["dur"] for e in phases) == pytest.approx(record.metrics.round_time_s * 1e6)


def test_slices_of_a_lane_do_not_overlap(events):
    lanes = {}
    for e in events:
        if e["ph"] == "X":
            lanes.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    assert len(lanes) > 4
    for spans in lanes.values():
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-6


def test_every_completion_preemption_and_tool_call_is_there(record, events):
    slices = [e for e in events if e["ph"] == "X" and e["pid"] >= 2]
    finished = [e for e in slices if e["args"]["ended"] == "finish"]
    assert len(finished) == len(record.finish_s)
    assert sorted(e["ts"] + e["dur"] for e in finished) == pytest.approx(record.finish_s * 1e6)
    preempted = [e for e in events if e["ph"] == "i" and e["name"] == "preempt"]
    assert len(preempted) == record.metrics.preemptions
    tools = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert tools
    end = record.phase.end_s * 1e6
    assert all(e["ts"] + e["dur"] <= end + 1e-6 for e in tools + slices)


def test_counters_stay_within_what_there_is(events):
    counters = [e for e in events if e["ph"] == "C"]
    cache = [e["args"]["value"] for e in counters if e["name"] == "KV tokens"]
    assert 0 < max(cache) <= 800
    running = [e for e in counters if e["name"] == "running attempts"]
    assert min(e["args"]["value"] for e in running) == 0
    assert max(e["args"]["value"] for e in running) <= 16
    assert {e["pid"] for e in running} == {2, 3}


def test_the_cache_over_time_is_that_of_the_log(record):
    times, fullest, mean, lost = cache_over_time(record, points=50)
    log = record.phase.log
    assert len(times) == len(fullest) == len(mean) == 50
    assert max(fullest) == log.kv_tokens.max()
    assert all(m <= f for m, f in zip(mean, fullest, strict=True))
    assert len(lost) == record.metrics.preemptions


@pytest.mark.slow
def test_a_picture_shows_it(record):
    report = round_report(SCENARIO, [record], warmup=2, seed=0)
    picture = round_png(report, None, record, SCENARIO.kv_capacity_tokens)
    assert picture.startswith(b"\x89PNG")
