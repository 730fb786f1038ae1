"""Bounds of a round: above what is simulated, and equal to it where nothing is wasted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.planner.rollouts.bounds import (
    engine_s_per_attempt,
    most_generated_per_s,
    most_per_s,
    work_of,
)
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.spec.rollout import RolloutScenario
from flopwright.spec.rollouts.engine import EngineModel, StepTable


def _scenario(**changes):
    plain = {
        "name": "t",
        "prompts": 16,
        "samples_per_prompt": 2,
        "lengths": {"kind": "exponential", "mean": 200},
        "decode": {"per_step": "10 ms", "per_attempt": "50 us", "per_context_token": "20 ns"},
        "update": {"fixed": "1 s", "per_token": "10 us"},
        "rounds": 8,
    }
    return RolloutScenario.model_validate(plain | changes)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    fraction=st.sampled_from([0.3, 0.6, 0.9, 1.0]),
    slots=st.sampled_from([None, 1, 3, 20]),
    instances=st.integers(1, 4),
    lengths=st.sampled_from(
        [
            {"kind": "exponential", "mean": 150},
            {"kind": "lognormal", "mean": 150, "sigma": 1.0, "cap": 1000},
            {"kind": "deterministic", "tokens": 70},
            {"kind": "pareto", "minimum": 50, "alpha": 2.5},
        ]
    ),
    seed=st.integers(0, 3),
)
def test_no_simulated_round_is_faster(fraction, slots, instances, lengths, seed):
    scenario = _scenario(
        **{"lambda": fraction}, slots_per_instance=slots, instances=instances, lengths=lengths
    )
    report = simulate(scenario, seed=seed)
    bound = most_per_s(scenario, work_of(scenario), scenario.rounds)
    assert report.attempts_per_s <= bound * (1 + 1e-9)


def test_equal_lengths_without_latency_reach_it():
    scenario = _scenario(
        lengths={"kind": "deterministic", "tokens": 100}, decode={"per_attempt": "1 ms"}
    )
    report = simulate(scenario, rounds=2)
    bound = most_per_s(scenario, work_of(scenario), 2)
    assert report.attempts_per_s == pytest.approx(bound, rel=1e-9)


def test_equal_lengths_with_latency_reach_it():
    decode = {"per_step": "10 ms", "per_attempt": "1 ms", "per_context_token": "1 us"}
    scenario = _scenario(lengths={"kind": "deterministic", "tokens": 100}, decode=decode)
    report = simulate(scenario, rounds=2)
    bound = most_per_s(scenario, work_of(scenario), 2)
    assert report.attempts_per_s == pytest.approx(bound, rel=1e-9)


def test_a_table_of_buckets_by_brute_force():
    table = StepTable(batch=(1, 4, 8), base_s=(3.0, 4.0, 10.0), per_context_token_s=(0, 0, 0))
    plain = _scenario(lengths={"kind": "deterministic", "tokens": 10})
    engine = EngineModel(decode=table, max_running=8)
    scenario = plain.model_copy(update={"decode": None, "engine": engine})
    work = work_of(scenario)
    # The cheapest token is one of four: 4 s / 4.
    assert engine_s_per_attempt(scenario, work) == pytest.approx(10 * min(3 / 1, 4 / 4, 10 / 8))
    assert most_generated_per_s(scenario, work) == pytest.approx(1 / 10)


def test_a_small_cache_lets_fewer_decode_at_once():
    table = StepTable.linear(1.0, 0.0, 0.0)
    plain = _scenario(lengths={"kind": "deterministic", "tokens": 101, "cap": 101})
    rates = []
    for capacity in (None, 400, 101):
        engine = EngineModel(decode=table, kv_capacity_tokens=capacity)
        scenario = plain.model_copy(update={"decode": None, "engine": engine})
        rates.append(engine_s_per_attempt(scenario, work_of(scenario)))
    # Mean context of a step is 50: 8 attempts in 400 tokens, 2.02 in 101.
    assert rates == pytest.approx([101 / 32, 101 / 8, 101 / 2.02])


def test_tools_bound_by_littles_law():
    scenario = _scenario(
        lengths={"kind": "deterministic", "tokens": 100},
        decode={"per_step": "1 ms"},
        agent={
            "tokens_per_turn": 10,
            "tool_time": {"kind": "fixed", "mean": "2 s"},
        },
    )
    work = work_of(scenario)
    assert work.tool_s == pytest.approx(18)
    assert most_generated_per_s(scenario, work) == pytest.approx(32 / 18.1)
