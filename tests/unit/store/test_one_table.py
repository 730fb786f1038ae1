"""Measurements, comparisons, sweeps and published runs are rows of one table, as Parquet too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flopwright.errors import InputError
from flopwright.planner.sweep import plan_point
from flopwright.planner.sweep_table import sweep_frame
from flopwright.report.metrics import Fingerprint, Measurement, StepMetrics
from flopwright.simulator.accuracy.report import AccuracyReport
from flopwright.simulator.accuracy.score import Scored
from flopwright.simulator.accuracy.table import accuracy_frame
from flopwright.spec.load import load_scenario
from flopwright.spec.sweep import sweep_points
from flopwright.store.frame import COLUMNS, joined, measurements_frame
from flopwright.store.frame_files import parquet_bytes, read_table, with_own_columns


def measured() -> pd.DataFrame:
    step = StepMetrics(
        step_time_s=0.5, tokens_per_s=1.0, tokens_per_s_per_gpu=1.0,
        model_flops_per_s_per_gpu=1.0, mfu=0.1, time_s={"forward": 0.5},
        memory_bytes=({"weights": 7},),
    )  # fmt: skip
    machine = Fingerprint(
        machine="m", processor="p", num_cores=2, world_size=2, threads_per_rank=1,
        memory_bytes=1, python="3", tool_version="0",
    )  # fmt: skip
    run = Measurement(
        id="a", created="2026-01-01", plan_name="dp2", plan={}, metrics=step,
        step_time_p10_s=0.4, step_time_p90_s=0.6, step_time_samples_s=(0.5,), discarded_steps=0,
        fingerprint=machine,
    )  # fmt: skip
    return measurements_frame([run])


@pytest.fixture(scope="module")
def swept() -> pd.DataFrame:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    points = sweep_points(
        scenario.model_copy(update={"sweep": {"cluster.node.gpu.hbm": ("8 GiB", "24 MiB")}})
    )
    return sweep_frame(map(plan_point, points))


def published() -> pd.DataFrame:
    labels = {
        "source": "somebody", "gpu": "h100", "model": "m", "family": "dense", "stack": "s",
        "framework": "f", "precision": "bf16", "recompute": "none", "cell": "c", "apart": "",
        "definition": "allocated",
    }  # fmt: skip
    run = Scored(id="r1", measured=2.0, predicted=2.2, low=2.0, high=2.4, labels=labels)
    peak = Scored(id="r1", measured=6e10, predicted=5e10, low=4e10, high=7e10, labels=labels)
    report = AccuracyReport(
        file="f", protocol="p", runs=(run,), memory=(peak,), skipped=(), by=(),
        free_parameters=0, parameters_by_level={}, baselines={},
    )  # fmt: skip
    return accuracy_frame(report)


def test_every_source_has_the_shared_columns_and_types(swept: pd.DataFrame) -> None:
    tables = [measured(), swept, published()]
    for table in tables:
        assert set(COLUMNS) <= set(table.columns)
        assert table[list(COLUMNS)].dtypes.equals(tables[0].dtypes)
    whole = joined([t[list(COLUMNS)] for t in tables])
    assert set(whole["source"]) == {"measured", "swept", "published", "predicted"}
    assert whole.columns.tolist() == list(COLUMNS)


def test_a_sweep_has_its_best_plans_numbers(swept: pd.DataFrame) -> None:
    fits, lacks = swept.iloc[0], swept.iloc[1]
    assert swept.columns[0] == "cluster.node.gpu.hbm"
    assert fits["verdict"] == "fits"
    times = [fits[c] for c in COLUMNS if c.startswith("time_") and pd.notna(fits[c])]
    assert sum(times) == pytest.approx(fits["step_time_s"])
    assert fits["step_time_p10_s"] < fits["step_time_s"] < fits["step_time_p90_s"]
    assert fits["scenario_hash"] != ""
    assert lacks["plan"] == ""
    assert pd.isna(lacks["step_time_s"])
    assert lacks["missing_bytes"] > 0


def test_published_runs_have_both_sides_and_their_peaks() -> None:
    table = published()
    assert table["source"].tolist() == ["published", "predicted"] * 2
    assert table["step_time_s"].tolist()[:2] == [2.0, 2.2]
    assert table["peak_memory_bytes"].tolist()[2:] == [6e10, 5e10]
    assert table["run_source"].unique().tolist() == ["somebody"]


@pytest.mark.parametrize("make", [measured, published])
def test_parquet_and_back(make: Any, tmp_path: Path) -> None:
    table = make()
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet_bytes(table))
    pd.testing.assert_frame_equal(read_table(path), table, check_dtype=False)
    assert read_table(path)[list(COLUMNS)].dtypes.equals(table[list(COLUMNS)].dtypes)


def test_a_sweep_comes_back_whole(swept: pd.DataFrame, tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    path.write_bytes(parquet_bytes(swept))
    back = read_table(path)
    assert back.columns.tolist() == swept.columns.tolist()
    assert back["step_time_s"].equals(swept["step_time_s"])


def test_what_is_no_such_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(parquet_bytes(measured())[:100])
    with pytest.raises(InputError, match="not a readable Parquet file"):
        read_table(path)
    path.write_bytes(parquet_bytes(pd.DataFrame({"a": [1]})))
    with pytest.raises(InputError, match="missing or of another type"):
        read_table(path)
    with pytest.raises(KeyError, match="step_time_s"):
        with_own_columns(measured(), behind={"step_time_s": [1.0]})
