"""A scenario's grid: its points, their rows, and what is refused."""

import io
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from flopwright.errors import InputError
from flopwright.planner.search import search
from flopwright.planner.sweep import as_columns, check_installed, run_sweep
from flopwright.planner.sweep_table import sweep_parquet
from flopwright.spec.load import load_scenario, scenario_from_text
from flopwright.spec.scenario import Scenario
from flopwright.spec.sweep import load_sweep, sweep_points

MINI = load_scenario("kimi_k2_mini_2cpu_fp32")


def _sweeping(**grid: Any) -> Scenario:
    block = {name.replace("__", "."): values for name, values in grid.items()}
    return Scenario.model_validate(MINI.to_data() | {"sweep": block})


def test_a_scenario_without_a_sweep_is_written_and_hashed_as_before() -> None:
    assert "sweep" not in MINI.to_data()
    swept = _sweeping(workload__seq_len=[128])
    assert Scenario.model_validate(swept.to_data()) == swept
    assert sweep_points(swept)[0].scenario.content_hash() == MINI.content_hash()


def test_points_are_the_product_with_the_last_field_fastest() -> None:
    scenario = _sweeping(cluster__node__gpus=[1, 2], workload__seq_len=[64, 128, 256])
    points = sweep_points(scenario)
    assert [p.index for p in points] == list(range(6))
    assert [tuple(p.values.values()) for p in points] == [
        (g, s) for g in (1, 2) for s in (64, 128, 256)
    ]
    for point in points:
        assert point.scenario.cluster.node.gpus == point.values["cluster.node.gpus"]
        assert point.scenario.workload.seq_len == point.values["workload.seq_len"]
        assert point.scenario.model == MINI.model


def test_names_become_records_and_inner_fields_follow_outer_ones() -> None:
    scenario = _sweeping(cluster__num_nodes=[2], cluster=["8_h100", "64_a100"], model=["qwen3_8b"])
    points = sweep_points(scenario)
    assert [p.scenario.cluster.name for p in points] == ["8_h100", "64_a100"]
    assert {p.scenario.cluster.num_nodes for p in points} == {2}
    assert points[0].scenario.model.name == "qwen3_8b"


def test_every_mistake_of_a_grid_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    data = MINI.to_data()
    data["sweep"] = {
        "workload.seq_length": [64],
        "workload.seq_len": [0, 64],
        "model": ["qwen3_8c"],
        "name.first": ["x"],
    }
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    text = path.read_text().splitlines()
    with pytest.raises(InputError) as caught:
        load_sweep(path)
    found = {v.field: v for v in caught.value.violations}
    assert set(found) == {"sweep.name.first", "model", "workload.seq_length", "workload.seq_len"}
    assert "did you mean 'qwen3_8b'?" in found["model"].nearest_fix
    for field, violation in found.items():
        assert violation.file == str(path)
        assert f"{field.removeprefix('sweep.')}:" in text[violation.line - 1]


@pytest.mark.slow
def test_a_block_must_sweep_something_once_and_not_too_much() -> None:
    with pytest.raises(InputError, match="sweeps nothing"):
        sweep_points(MINI)
    scenario = _sweeping(workload__seq_len=[64, 64], workload__seed=list(range(6000)), model=[])
    with pytest.raises(InputError) as caught:
        sweep_points(scenario)
    rules = [v.rule for v in caught.value.violations]
    assert "a value stands twice" in rules
    assert "an empty list" in rules
    large = _sweeping(workload__seq_len=[64, 128], workload__seed=list(range(6000)))
    with pytest.raises(InputError, match="too many points"):
        sweep_points(large)


def test_a_row_is_the_best_plan_of_its_point_and_what_does_not_fit_is_a_row() -> None:
    scenario = _sweeping(
        cluster__node__gpu__hbm=["8 GiB", "24 MiB"], workload__global_batch_size=[16, 15]
    )
    points = sweep_points(scenario)
    rows = list(run_sweep(points))
    assert [r.verdict for r in rows] == [
        "fits",
        "no_legal_plan",
        "does_not_fit",
        "no_legal_plan",
    ]
    result = search(points[0].scenario, top_k=1)
    assert result.best is not None
    metrics = result.best.prediction.metrics
    assert rows[0].plan == result.best.plan.label()
    assert rows[0].step_time_s == metrics.step_time_s
    assert rows[0].tokens_per_s_per_gpu == metrics.tokens_per_s_per_gpu
    steps = points[0].scenario.workload.num_steps
    assert rows[0].days == pytest.approx(steps * metrics.step_time_s / 86_400)
    assert rows[2].missing_bytes > 0
    assert "global_batch_size" in rows[1].reason


@pytest.mark.slow
def test_two_processes_give_the_table_of_one() -> None:
    points = sweep_points(_sweeping(workload__seq_len=[64, 128, 256]))
    once = as_columns(run_sweep(points))
    assert as_columns(run_sweep(points, jobs=2)) == once
    assert once["workload.seq_len"] == [64, 128, 256]


def test_parquet_holds_the_rows() -> None:
    pytest.importorskip("pyarrow")
    points = sweep_points(
        _sweeping(cluster__node__gpu__hbm=["8 GiB", "24 MiB"], search__vpp=[[1], [1, 2]])
    )
    rows = list(run_sweep(points))
    frame = pd.read_parquet(io.BytesIO(sweep_parquet(reversed(rows))))
    assert frame["verdict"].tolist() == ["fits", "fits", "does_not_fit", "does_not_fit"]
    assert frame["search.vpp"].tolist() == ["[1]", "[1, 2]"] * 2
    assert frame["step_time_s"][0] == rows[0].step_time_s
    assert frame["step_time_s"].isna().tolist() == [False, False, True, True]
    alone = pd.read_parquet(io.BytesIO(sweep_parquet(rows[2:])))
    assert alone.dtypes.to_dict() == frame.dtypes.to_dict()


def test_an_absent_backend_is_refused_with_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    points = sweep_points(_sweeping(workload__seq_len=[64]))
    with pytest.raises(InputError, match="pip install ray"):
        run_sweep(points, backend="ray")
    with pytest.raises(InputError, match="pip install pyarrow"):
        check_installed("pyarrow")


@pytest.mark.slow
def test_a_local_ray_gives_the_table_of_one_process() -> None:
    pytest.importorskip("ray")
    points = sweep_points(_sweeping(workload__seq_len=[64, 128]))
    once = as_columns(run_sweep(points))
    assert as_columns(run_sweep(points, jobs=1, backend="ray")) == once


def test_an_uploaded_scenario_may_hold_a_sweep() -> None:
    data = MINI.to_data() | {"sweep": {"workload.seq_len": [64]}}
    assert scenario_from_text(yaml.safe_dump(data)).sweep == {"workload.seq_len": (64,)}
