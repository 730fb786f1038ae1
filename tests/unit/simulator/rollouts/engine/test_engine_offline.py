"""Offline runs: limit cases, token counts, and the published rows."""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.simulator.hardware.nodes.types import cluster_of
from flopwright.simulator.rollouts.engine.catalog import load_served
from flopwright.simulator.rollouts.engine.experiment import engine_metrics
from flopwright.simulator.rollouts.engine.offline import decode_rate, offline_run
from flopwright.simulator.rollouts.engine.price import Served, pass_seconds
from flopwright.simulator.rollouts.engine.rows import load
from flopwright.simulator.rollouts.engine.software import engine_names, engine_software
from flopwright.spec.load import SCENARIO_CATALOG
from flopwright.spec.rollouts.engine import Speculation
from flopwright.spec.rollouts.engine_experiment import EngineExperiment
from flopwright.spec.rollouts.engine_served import EngineShape, EngineSoftware
from flopwright.spec.yaml_lines import read_yaml

ONE_BY_ONE = EngineSoftware(name="one", max_running=1)


def llama(software: EngineSoftware = ONE_BY_ONE) -> Served:
    model = load_served("llama31_8b")
    return Served(
        model=model, cluster=cluster_of("hgx_h100", 1), shape=EngineShape(), software=software
    )


def test_one_sequence_at_a_time_is_the_sum_of_its_steps() -> None:
    run = offline_run(llama(), 512, 16, 3)
    first = pass_seconds(
        llama(), load(0.0, 0.0, prompts=1.0, prompt_tokens=512.0, prompt_pairs=512.0**2 / 2)
    ).seconds[0]
    rest = sum(
        float(pass_seconds(llama(), load(1.0, 512.0 + made)).seconds[0]) for made in range(1, 16)
    )
    assert run.seconds == pytest.approx(3 * (float(first) + rest), rel=0.01)
    assert run.output_tokens_per_s * run.seconds == pytest.approx(3 * 16)


def test_more_at_once_is_faster_until_memory_binds() -> None:
    rates = [
        offline_run(llama(EngineSoftware(name="n", max_running=n)), 256, 64, 64).per_gpu
        for n in (1, 4, 16, 64)
    ]
    assert rates == sorted(rates)


def test_a_sequence_longer_than_the_cache_is_an_error_that_says_so() -> None:
    with pytest.raises(InputError, match="does not fit the cache"):
        offline_run(llama(), 1000, 10_000_000, 1)


def test_speculation_gives_its_tokens_at_the_price_of_verifying() -> None:
    on = llama()
    plain = decode_rate(on, 4, 2000)
    drafted = decode_rate(on, 4, 2000, Speculation(drafts=3, acceptance=0.8))
    assert plain < drafted < plain * Speculation(drafts=3, acceptance=0.8).tokens_per_step
    assert decode_rate(on, 4, 2000, Speculation(drafts=3, acceptance=0.0)) <= plain


def test_every_engine_that_ships_says_where_its_numbers_come_from() -> None:
    assert {"sglang", "trtllm_bench", "vllm"} <= set(engine_names())
    for name in engine_names():
        assert engine_software(name).name == name
        assert engine_software(name).sources
    with pytest.raises(InputError, match="no such engine"):
        engine_software("vlm")


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "bound"), [("trtllm", 0.15), ("lmsys", 0.15)])
def test_published_engine_rows_are_met(preset: str, bound: float, measured_data: Path) -> None:
    with (measured_data / "validation" / "rl_runs.csv").open(newline="") as file:
        values = {row["id"]: row["value"] for row in csv.DictReader(file)}
    errors = []
    for path in sorted((SCENARIO_CATALOG / "published_rl").glob(f"{preset}_*.yaml")):
        data = read_yaml(path).data
        row = data["rows"][0]
        if row["class"] == "F1":
            found = engine_metrics(EngineExperiment.model_validate(data["experiment"]))
            errors.append(abs(found[row["metric"]] / float(values[row["id"]]) - 1))
    assert len(errors) == {"trtllm": 16, "lmsys": 6}[preset]
    assert statistics.median(errors) <= bound
