"""Rollout scenarios: the shipped ones load and run, wrong ones are refused with line and fix."""

from __future__ import annotations

import math

import pytest

from flopwright.errors import InputError
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.spec.load import dump_yaml
from flopwright.spec.loop import round_names
from flopwright.spec.rollout import (
    RolloutScenario,
    load_rollout_scenario,
    longest,
    rollout_scenario_from_text,
    with_stop_fraction,
)

GOOD = """\
name: good
prompts: 8
samples_per_prompt: 2
lengths: {kind: exponential, mean: 50, cap: 200}
lambda: 0.5
decode: {per_step: 10 ms, per_attempt: 1 us}
"""


@pytest.mark.parametrize("name", round_names())
def test_shipped_scenarios_load_say_their_sources_and_read_back(name):
    scenario = load_rollout_scenario(name)
    assert scenario.name == name
    assert scenario.sources
    assert rollout_scenario_from_text(dump_yaml(scenario)) == scenario


def test_every_assumed_number_of_the_k2_scenario_says_so():
    scenario = load_rollout_scenario("kimi_k2_like_256gpu_h800")
    data = scenario.to_data()
    numbers = {"name", "description", "kind", "ties", "rounds", "seed", "sources", "goals"} ^ set(
        data
    )
    sourced = {key.split(".")[0] for key in scenario.sources} | {"instances"}
    assert numbers <= sourced
    report = simulate(scenario, rounds=1)
    assert any(text.startswith("lengths: assumed") for text in report.assumptions)
    assert report.kv_fits


def test_good_text_loads():
    scenario = rollout_scenario_from_text(GOOD)
    assert scenario.stop_fraction == 0.5
    assert scenario.num_attempts == 16
    assert longest(scenario.lengths) == 200


def test_a_time_alone_is_a_fixed_time():
    scenario = rollout_scenario_from_text(GOOD + "update: 3 s\nweight_sync: 20 ms\n")
    assert scenario.update.fixed_s == 3
    assert scenario.weight_sync.seconds == 0.02
    assert scenario.fixed_s == pytest.approx(3.02)


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("lengths", "lenghts", 4, "did you mean 'lengths'"),
        ("kind: exponential", "kind: exponentail", 4, "did you mean 'exponential'"),
        ("mean: 50", "maen: 50", 4, "did you mean 'mean'"),
        ("lambda: 0.5", "lambda: 1.5", 5, "less than or equal to 1"),
        ("lambda: 0.5", "lambda: 0", 5, "greater than or equal to 0.01"),
        ("per_step: 10 ms", "per_step: 10", 6, "has no unit"),
        ("per_step: 10 ms, per_attempt: 1 us", "per_step: 0 s", 6, "must be above zero"),
        ("prompts: 8", "prompts: 0", 2, "greater than 0"),
        ("prompts: 8", "prompts: 2000000", 2, "less than or equal to 1000000"),
        ("mean: 50", "mean: 0", 4, "greater than 0"),
        ("cap: 200}", "cap: -1}", 4, "not negative"),
        ("lambda: 0.5", "lambda: 1e-9", 5, "greater than or equal to 0.01"),
        ("per_step: 10 ms", "per_step: 1e308 s", 6, "less than or equal to 86400"),
        ("mean: 50", "mean: 1e300", 4, "less than or equal to 1000000000"),
        ("prompts: 8", "prompts: 600000", 1, "is above 1000000"),
    ],
)
def test_wrong_values_name_line_and_fix(old, new, line, words):
    assert old in GOOD
    with pytest.raises(InputError) as error:
        rollout_scenario_from_text(GOOD.replace(old, new, 1), "x.yaml")
    assert words in str(error.value)
    assert any(v.line == line and v.file == "x.yaml" for v in error.value.violations)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("instances: 17\n", "must not exceed the attempts"),
        ("slots_per_instance: 0\n", "greater than 0"),
        ("ties: some\n", "not one of the choices"),
        ("kv: {per_token: 1 KiB, capacity: 100 KiB}\n", "larger than kv.capacity"),
        ("kv: {capacity: 100 KiB}\n", "needs per_token"),
        ("weight_sync: {size: 1 GB}\n", "needs a bandwidth"),
        ("weight_sync: {size: 1 GB, bandwidth: 1 B/s}\n", "longer than a day"),
        ("rounds: 1000000000\n", "less than or equal to 10000"),
        ("update: 1e300 s\n", "less than or equal to 86400"),
        ("goals: {max_mean_staleness: .inf}\n", "finite|less than or equal"),
    ],
)
def test_impossible_combinations_are_refused(more, words):
    with pytest.raises(InputError, match=words):
        rollout_scenario_from_text(GOOD + more)


def test_a_context_larger_than_the_capacity_names_a_cap_that_fits():
    text = GOOD + "prompt_tokens: 20\nkv: {per_token: 1 KiB, capacity: 100 KiB}\n"
    with pytest.raises(InputError, match=r"one context of 220 tokens.*lengths\.cap: 80 would fit"):
        rollout_scenario_from_text(text)
    fits = rollout_scenario_from_text(text.replace("cap: 200", "cap: 80"))
    assert simulate(fits, rounds=2).rounds
    endless = text.replace(", cap: 200", "")
    with pytest.raises(InputError, match=r"needs lengths\.cap"):
        rollout_scenario_from_text(endless)


def test_empirical_lengths_need_as_many_weights_as_values():
    text = GOOD.replace(
        "{kind: exponential, mean: 50, cap: 200}",
        "{kind: empirical, values: [3, 5], weights: [1]}",
    )
    with pytest.raises(InputError, match="as many as values"):
        rollout_scenario_from_text(text)


@pytest.mark.parametrize("weights", ["[.inf, 1]", "[1e308, 1e308]", "[0, 0]", "[.nan, 1]"])
def test_empirical_weights_must_have_a_finite_sum(weights):
    law = f"{{kind: empirical, values: [3, 5], weights: {weights}}}"
    text = GOOD.replace("{kind: exponential, mean: 50, cap: 200}", law)
    with pytest.raises(InputError, match=r"weights|finite"):
        rollout_scenario_from_text(text)


@pytest.mark.parametrize(
    ("law", "words"),
    [
        ("{kind: lognormal, mean: 50, sigma: 100}", "less than or equal to 10"),
        ("{kind: lognormal, mean: 50, sigma: .inf}", "finite|less than or equal to 10"),
        ("{kind: pareto, minimum: 5, alpha: .inf}", "finite|less than or equal to 100"),
        ("{kind: pareto, minimum: 5, alpha: 1.000000001}", r"greater than 1\.01"),
        ("{kind: deterministic, tokens: 1e300}", "less than or equal to 1000000000"),
    ],
)
def test_laws_of_length_are_bounded(law, words):
    text = GOOD.replace("{kind: exponential, mean: 50, cap: 200}", law)
    with pytest.raises(InputError, match=words):
        rollout_scenario_from_text(text)


def test_laws_at_their_bounds_still_run():
    for law in (
        "{kind: lognormal, mean: 50, sigma: 10}",
        "{kind: lognormal, mean: 1e9, sigma: 0.001}",
        "{kind: pareto, minimum: 1e9, alpha: 1.011}",
        "{kind: empirical, values: [3, 1e9], weights: [1e308, 1]}",
    ):
        text = GOOD.replace("{kind: exponential, mean: 50, cap: 200}", law)
        scenario = rollout_scenario_from_text(text.replace("per_step: 10 ms", "per_step: 1 d"))
        report = simulate(scenario, rounds=2)
        numbers = [
            report.attempts_per_s,
            report.steady.round_time_s,
            *report.closed_forms.values(),
        ]
        assert all(math.isfinite(x) for x in numbers)


@pytest.mark.parametrize("value", [0.0, 1e-9, -1.0, 1.01, float("nan")])
def test_lambda_outside_its_range_is_refused(value):
    scenario = rollout_scenario_from_text(GOOD)
    with pytest.raises(InputError, match="lambda"):
        with_stop_fraction(scenario, value)


def test_unknown_names_and_missing_files():
    with pytest.raises(InputError, match="did you mean 'small_exponential_1gpu'"):
        load_rollout_scenario("small_exponentail_1gpu")
    with pytest.raises(InputError, match="cannot read"):
        load_rollout_scenario("nowhere/x.yaml")


def test_schema_knows_the_file_names_of_the_fields():
    schema = RolloutScenario.model_json_schema(by_alias=True)
    assert "lambda" in schema["properties"]
    assert "stop_fraction" not in schema["properties"]
