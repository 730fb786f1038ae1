"""Parquet: everything out and back in, equal; what is broken is named."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.report.metrics import Fingerprint, Measurement, StageMetrics, StepMetrics
from flopwright.report.records import (
    EngineLine,
    EngineRecord,
    RoundSample,
    RoundsRecord,
    StagesRecord,
    with_own_id,
)
from flopwright.report.trace import TraceEvent
from flopwright.store import Store, open_store
from flopwright.store.frame import COLUMNS
from flopwright.store.parquet import export_parquet, import_parquet

TRACE = (TraceEvent(0, "compute", "F(0,0)", "forward", 0.0, 0.5),)


def full_store(path: Path) -> Store:
    store = open_store(str(path))
    metrics = StepMetrics(
        step_time_s=0.5,
        tokens_per_s=2048,
        tokens_per_s_per_gpu=1024,
        model_flops_per_s_per_gpu=1e9,
        mfu=0.25,
        time_s={"forward": 0.5},
        memory_bytes=({"weights": 100},),
    )
    machine = Fingerprint(
        machine="m", processor="p", num_cores=2, world_size=2, threads_per_rank=1,
        memory_bytes=1, python="3", tool_version="0",
    )  # fmt: skip
    for name in ("a", "b"):
        store.add(
            Measurement(
                id=name, created="2026-01-01", plan_name="dp2", plan={}, metrics=metrics,
                step_time_p10_s=0.4, step_time_p90_s=0.6, step_time_samples_s=(0.5,),
                discarded_steps=1, fingerprint=machine, losses=(2.0, float("nan")),
            ),
            TRACE if name == "a" else (),
        )  # fmt: skip
    round_ = RoundSample(
        round=3, round_time_s=60.0, time_s={"generation": 40.0, "update": 20.0},
        generated_tokens=1e6, tokens_per_s=2e4,
    )  # fmt: skip
    about = {"id": "", "created": "2026-01-02", "source": "verl"}
    store.add_record(with_own_id(RoundsRecord(**about, name="grpo", gpus=8, rounds=(round_,))))
    stage = StageMetrics(stage="pretrain", wall_s=10.0, gpu_s=80.0, cost_usd=1.5)
    store.add_record(with_own_id(StagesRecord(**about, name="campaign", stages=(stage,))))
    line = EngineLine(phase="mixed", running=3, waiting=0)
    store.add_record(with_own_id(EngineRecord(**about, name="serve", lines=(line,))))
    return store


def test_out_and_in_again(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    store, file = full_store(tmp_path / "one.sqlite"), tmp_path / "all.parquet"
    assert export_parquet(store, file) == 5
    other = open_store(str(tmp_path / "two.sqlite"))
    assert import_parquet(other, file) == (5, 0)
    assert import_parquet(other, file) == (0, 5)
    assert [m.to_data() for m in other.measurements()] == [
        m.to_data() for m in store.measurements()
    ]
    assert other.records() == store.records()
    assert other.trace("a") == TRACE
    assert other.trace("b") == ()
    import pandas as pd

    frame = pd.read_parquet(file)
    assert list(frame.columns) == [*COLUMNS, "record_kind", "record", "trace"]


def test_one_table_holds_steps_rounds_and_stages(tmp_path: Path) -> None:
    frame = full_store(tmp_path / "one.sqlite").frame()
    assert list(frame.columns) == list(COLUMNS)
    assert list(frame["kind"]) == ["step", "step", "round", "stage"] or set(frame["kind"]) == {
        "step", "round", "stage",
    }  # fmt: skip
    round_ = frame[frame["kind"] == "round"].iloc[0]
    assert (round_["round_time_s"], round_["time_generation_s"], round_["index"]) == (60, 40, 3)
    assert round_["step_time_s"] != round_["step_time_s"]  # not a number
    stage = frame[frame["kind"] == "stage"].iloc[0]
    assert (stage["phase"], stage["wall_s"], stage["cost_usd"]) == ("pretrain", 10, 1.5)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "all.parquet"
    export_parquet(full_store(tmp_path / "one.sqlite"), file)
    file.write_bytes(file.read_bytes()[:-200])
    store = open_store(str(tmp_path / "two.sqlite"))
    with pytest.raises(InputError, match=r"all\.parquet.*not a readable Parquet file"):
        import_parquet(store, file)
    assert store.measurements() == []


def test_a_foreign_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    file = tmp_path / "other.parquet"
    pd.DataFrame({"x": [1]}).to_parquet(file)
    with pytest.raises(InputError, match="no export of a store"):
        import_parquet(open_store(str(tmp_path / "two.sqlite")), file)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"flopwright\[parquet\]"):
        export_parquet(open_store(str(tmp_path / "one.sqlite")), tmp_path / "x.parquet")
