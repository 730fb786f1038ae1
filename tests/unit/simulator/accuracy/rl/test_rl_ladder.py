"""The ladder of rollouts.md 1.5 on published rows, predicted by the scenarios that ship."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from flopwright.simulator.accuracy.rl.load import FOLDER, load_scenarios
from flopwright.simulator.accuracy.rl.predictor import Predictor
from flopwright.simulator.accuracy.rl.rows import Row, read_rows
from flopwright.simulator.rollouts.layouts import IterationReport, iteration
from flopwright.spec.rollouts.engine import EngineModel, PrefillTable, StepTable
from flopwright.spec.rollouts.layout import LayoutInput

pytestmark = pytest.mark.slow
WITHIN_A_FIFTH: Final = 0.20


@pytest.fixture(scope="module")
def predictor(measured_data: Path) -> Predictor:
    return Predictor(load_scenarios(FOLDER), read_rows(measured_data / "validation/rl_runs.csv"))


def _value(rows: dict[str, Row], row_id: str) -> float:
    return rows[row_id].values[0].middle


def _off(predictor: Predictor, scenario: str, metric: str, row_id: str) -> float:
    return predictor.metric(scenario, metric) / _value(predictor.rows, row_id) - 1


def test_v3_colocated_generation_on_32_and_64_gpus_is_within_a_fifth(predictor: Predictor) -> None:
    few = predictor.metric("verl_async_7b_colocated_32", "generation_time")
    many = predictor.metric("verl_async_7b_colocated_64", "generation_time")
    assert many < few < 2 * many
    for gpus, row in ((32, "rl094"), (64, "rl101")):
        error = _off(predictor, f"verl_async_7b_colocated_{gpus}", "generation_time", row)
        assert abs(error) < WITHIN_A_FIFTH


def test_v5_divided_and_longest_first_beat_static_groups_and_shorten_the_tail(
    predictor: Predictor,
) -> None:
    names = ("verl", "divided", "longest_first")
    time = {n: predictor.metric(f"seer_moonlight_{n}", "generation_time") for n in names}
    assert time["divided"] < time["verl"]
    assert time["longest_first"] < time["verl"]
    tails = [predictor.metric(f"seer_moonlight_{n}", "tail_time") for n in names]
    assert tails[1] < tails[0]
    assert tails[2] < tails[0]


def test_v6_throughput_has_its_knee_between_one_and_two_versions(predictor: Predictor) -> None:
    bounds = ((1, "rl208"), (2, "rl209"), (8, "rl211"))
    rate = {e: predictor.metric(f"areal_1_5b_eta{e}", "tokens_per_s") for e, _ in bounds}
    sync = predictor.metric("areal_1_5b_sync", "tokens_per_s")
    assert sync < rate[1] < rate[2] / 1.1
    assert rate[8] < 1.1 * rate[2]
    for eta, row in bounds:
        assert abs(rate[eta] / _value(predictor.rows, row) - 1) < WITHIN_A_FIFTH
    assert abs(_off(predictor, "areal_1_5b_sync", "train_time", "rl196")) < WITHIN_A_FIFTH


def test_v8_cache_pressure_takes_from_over_issue_what_it_gains_without() -> None:
    """rollouts.md 0.6: more attempts in flight meet a full cache and are prefilled again."""
    batch = {
        "prompts": 64,
        "samples": 4,
        "prompt_tokens": 100,
        "lengths": {"mean": 3000, "sigma": 0.8, "cap": 12_000},
    }

    def run(in_flight: float, routing: str, capacity: int | None) -> IterationReport:
        engine = EngineModel(
            decode=StepTable.linear(0.01, 1e-4, 2e-8),
            prefill=PrefillTable(per_token=5e-5),
            kv_capacity_tokens=capacity,
            max_running=256,
        )
        fleet = {"engine": engine.to_data(), "instances": 4, "routing": routing}
        given = {
            "batch": batch,
            "fleet": {**fleet, "chunk_tokens": 512},
            "times": {"update": "1 s"},
            "layout": {"kind": "colocated", "in_flight": in_flight},
        }
        return iteration(LayoutInput.model_validate(given))

    gain = {}
    for capacity in (None, 40_000):
        static = run(1, "group_round_robin", capacity)
        more = run(2, "least_loaded", capacity)
        gain[capacity] = static.generation_s / more.generation_s
        if capacity is not None:
            assert more.preempted > 5 * static.preempted
            longest_first = run(1, "pooled_longest_first", capacity)
            assert longest_first.preempted == 0
            assert longest_first.generation_s < static.generation_s
    assert 1 < gain[40_000] < gain[None]
