"""Asynchronous loops on the round's own engines, and GPUs that are lent."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.simulator.rollouts.layouts import iteration
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.simulator.rollouts.streaming import Lending, in_flight, stream
from flopwright.spec.rollout import RolloutScenario
from flopwright.spec.rollouts.engine import EngineModel, PrefillTable, StepTable
from flopwright.spec.rollouts.layout import (
    Batch,
    Fleet,
    FullyAsync,
    GroupLengths,
    LayoutInput,
    PhaseTimes,
)


def _round(**changes):
    plain = {
        "name": "streamed",
        "prompts": 32,
        "samples_per_prompt": 2,
        "lengths": {"kind": "lognormal", "mean": 200, "sigma": 0.8, "cap": 1500},
        "decode": {"per_step": "10 ms", "per_attempt": "100 us"},
        "instances": 4,
        "update": "4 s",
        "weight_sync": "500 ms",
        "kv": {"on_update": "keep"},
    }
    return RolloutScenario.model_validate(plain | changes)


def test_slow_training_hides_generation_and_the_step_is_the_update():
    found = stream(_round(update="60 s"), 1, rounds=4, seed=0)
    assert found.steady.time_s["generation"] == 0
    assert found.steady.round_time_s == pytest.approx(60.5)
    assert found.attempts_per_s == pytest.approx(64 / 60.5)


def test_an_update_without_time_and_bound_0_is_the_synchronous_loop():
    scenario = _round(update="0 s", **{"lambda": 1.0})
    found = stream(scenario, 0, rounds=6, seed=3)
    plain = simulate(scenario, 6, 3)
    assert found.lags.max() == 0
    assert found.attempts_per_s == pytest.approx(plain.attempts_per_s, rel=0.03)


def test_generation_that_binds_reaches_its_own_rate_and_the_bound_of_little():
    # In flight over consumed per version: bound + 1 versions from submission to training.
    scenario = _round(update="100 ms", weight_sync="0 s", slots_per_instance=16)
    found = stream(scenario, 3, rounds=10, seed=1)
    # All slots decode all the time: 64 slots, 10 ms + 16 * 0.1 ms a step, 200 tokens each.
    mean = 200 * 0.99  # the cap takes a little
    assert found.attempts_per_s == pytest.approx(64 / (mean * 0.0116), rel=0.05)
    assert found.steady.gpu_idle_share < 0.02
    assert found.mean_staleness < 3


def test_throughput_rises_steeply_with_the_bound_and_is_then_flat():
    rates = [stream(_round(), bound, rounds=8, seed=0).attempts_per_s for bound in (0, 1, 2, 8)]
    assert rates[1] > 1.1 * rates[0]
    assert rates[3] < 1.1 * rates[2]


@pytest.mark.parametrize("bound", [1, 3])
def test_it_agrees_with_the_stream_of_single_turn_batches(bound):
    scenario = _round(update="3 s")
    table = StepTable.linear(0.01, 1e-4, 0.0)
    other = iteration(
        LayoutInput(
            batch=Batch(
                prompts=32, samples=2, prompt_tokens=0,
                lengths=GroupLengths(mean=198, sigma=0.8, cap=1500, group_share=0.0),
            ),
            fleet=Fleet(
                engine=EngineModel(decode=table, prefill=PrefillTable()), instances=4
            ),
            times=PhaseTimes.model_construct(
                update_s=3.0, log_prob_s=0.0, sync_s=0.5, switch_s=0.0
            ),
            layout=FullyAsync(staleness=bound, on_sync="keep"),
            seed=0,
        )
    )  # fmt: skip
    found = stream(scenario, bound, rounds=12, seed=0)
    assert found.steady.round_time_s == pytest.approx(other.step_s, rel=0.12)
    assert found.mean_staleness == pytest.approx(other.staleness, abs=0.35)


def test_same_seed_same_result_and_both_loops_agree(scenario_of_seed):
    for number in (1, 4, 7, 12, 19, 23):
        plain = _round()
        scenario = scenario_of_seed(number).model_copy(
            update={"update": plain.update, "staleness": plain.staleness, "instances": 1}
        )
        a = stream(scenario, 1, rounds=3, seed=2, loop="simpy")
        b = stream(scenario, 1, rounds=3, seed=2, loop="compiled")
        assert a.steady == b.steady
        assert np.array_equal(a.lags, b.lags)


LENT = Lending(instances=4, switch_s=0.2, back_s=0.2, below=1.0)


def test_lent_gpus_help_where_generation_binds_and_are_not_lent_where_it_does_not():
    slow = _round(update="500 ms", prompts=64, slots_per_instance=4)
    alone = stream(slow, 1, rounds=6, seed=0)
    lent = stream(slow, 1, rounds=6, seed=0, lending=LENT)
    assert lent.lent_share > 0.5
    assert 1.3 < lent.attempts_per_s / alone.attempts_per_s < 2.0
    hidden = _round(update="60 s")
    never = stream(hidden, 1, rounds=3, seed=0, lending=LENT)
    assert never.lent_share == 0
    assert never.steady == stream(hidden, 1, rounds=3, seed=0).steady


def test_lent_engines_take_a_fair_share_of_what_runs():
    # No queue: what runs is spread over twice the engines, and reads its context again there.
    loaded = _round(update="100 ms", decode={"per_step": "1 ms", "per_attempt": "2 ms"})
    alone = stream(loaded, 0, rounds=4, seed=0)
    lent = stream(loaded, 0, rounds=4, seed=0, lending=LENT)
    assert lent.attempts_per_s > 1.2 * alone.attempts_per_s


def test_a_switch_that_takes_too_long_does_not_pay():
    slow = _round(update="500 ms", prompts=64, slots_per_instance=4)
    dear = Lending(instances=4, switch_s=14.0, back_s=14.0)
    assert (
        stream(slow, 1, rounds=4, seed=0, lending=dear).attempts_per_s
        < stream(slow, 1, rounds=4, seed=0).attempts_per_s
    )


def test_what_is_too_old_is_dropped_in_a_stream_too():
    scenario = _round(staleness={"rule": "drop", "max_versions": 1}, update="1 s")
    assert stream(scenario, 2, rounds=8, seed=0).lags.max() == 1
    free = scenario.model_copy(update={"staleness": _round().staleness})
    assert stream(free, 2, rounds=8, seed=0).lags.max() > 1
    waits = _round(staleness={"rule": "wait", "max_versions": 1})
    with pytest.raises(InputError, match="drop or mask"):
        stream(waits, 2, rounds=1, seed=0)


def test_too_many_in_flight_are_refused():
    many = _round(prompts=400_000)
    with pytest.raises(InputError, match="more attempts into flight"):
        in_flight(many, 8)
