"""A campaign of 100 rounds whose lengths grow eightfold: the storm, and the throttle beside it."""

from __future__ import annotations

import pytest

from flopwright.errors import InputError
from flopwright.planner.rollouts.campaign import campaign
from flopwright.planner.rollouts.figure import campaign_png
from flopwright.planner.rollouts.text import campaign_lines
from flopwright.simulator.rollouts.rounds import simulate_rounds
from flopwright.spec.rollout import RolloutScenario, load_rollout_scenario


def _growing(**changes):
    plain = {
        "name": "growing",
        "prompts": 32,
        "samples_per_prompt": 4,
        "prompt_tokens": 32,
        "lengths": {"kind": "lognormal", "mean": 200, "sigma": 0.6, "cap": 3200},
        "lambda": 0.9,
        "decode": {"per_step": "10 ms", "per_attempt": "50 us", "per_context_token": "20 ns"},
        "prefill": {"fixed": 0.005, "per_token": 2.5e-4, "per_pair": 2e-8},
        "kv": {"per_token": "1 KiB", "capacity": "20 MiB"},
    }
    return RolloutScenario.model_validate(plain | changes)


@pytest.fixture(scope="module")
def found():
    # flopwright rollouts growing_lengths_32b_1gpu_h200 --campaign --rounds 100 --growth 8
    scenario = load_rollout_scenario("growing_lengths_32b_1gpu_h200")
    return campaign(scenario, rounds=100, growth=8, slots=(45, 64, 91, 128, 256))


@pytest.mark.slow
def test_the_best_of_round_one_ends_in_a_storm_and_the_throttle_does_not(found):
    assert found.first_best.slots == 256
    assert sum(found.first_best.preemptions[:5]) == 0
    assert found.storm > 3  # every attempt loses its cache more than three times
    assert found.fixed_behind > 0.05
    assert found.behind < 0.10
    assert found.worst_round < 0.10  # of the optimum of that very round
    last = found.throttled.preemptions[-10:]
    assert sum(last) < 0.1 * found.storm * found.attempts * len(last)


@pytest.mark.slow
def test_a_small_cache_makes_the_storm_dear():
    found = campaign(_growing(), rounds=10, growth=8, slots=(16, 24, 32, 48, 64, 128))
    assert found.first_best.slots == 128
    assert sum(found.first_best.preemptions[:2]) == 0
    assert found.storm > 2  # every attempt loses its cache more than twice
    assert found.fixed_behind > 0.1
    assert found.behind < 0.10
    assert found.worst_round < 0.10
    throttled = sum(found.throttled.preemptions) / len(found.throttled.preemptions)
    assert throttled < 0.25 * found.storm * found.attempts


@pytest.mark.slow
def test_the_optimum_is_the_least_of_each_round(found):
    for number, least in enumerate(found.optimum_s):
        assert least == min(run.round_s[number] for run in found.fixed)
    assert found.length_factor[0] == 1
    assert found.length_factor[-1] == pytest.approx(8)
    text = "\n".join(campaign_lines(found))
    assert "256 slots" in text
    assert "best in round 1" in text
    assert campaign_png(found).startswith(b"\x89PNG")


def test_a_run_of_it_is_the_simulators():
    scenario = _growing()
    one = campaign(scenario, rounds=3, growth=1, slots=(16,), seed=5)
    plain = simulate_rounds(scenario.model_copy(update={"slots_per_instance": 16}), 3, 5)
    assert one.fixed[0].round_s == tuple(r.metrics.round_time_s for r in plain)


def test_without_an_end_of_the_cache_there_is_nothing_to_compare():
    with pytest.raises(InputError, match="runs short"):
        campaign(_growing(kv={"per_token": "1 KiB"}), rounds=2)
