"""Tables of measured rows: which rows are one run, which value they hold, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.simulator.accuracy.rows import (
    Configuration,
    Metric,
    memory_by_definition,
    positive,
    read_configurations,
    step_seconds,
)

HEAD = "id,source,model,seq,n_gpus,gbs,metric,value,unit,notes\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "rows.csv"
    path.write_text(text)
    return path


def made(
    notes: str = "", source: str = "", framework: str = "", **metrics: float
) -> Configuration:
    """Returns a configuration with these metrics, in SI."""
    return Configuration(
        id="a",
        cells={"source": source, "framework": framework},
        metrics=tuple(Metric(f"a-{k}", k, v) for k, v in metrics.items()),
        notes=notes,
    )


def test_rows_of_one_run_share_the_id_up_to_the_metric(tmp_path: Path) -> None:
    text = HEAD + (
        "x-1-step_time,s,m,2048,8,16,step_time,2.5,s,slow\n"
        "x-1-mfu,s,m,2048,8,16,mfu,40,%,fast\n"
        "x-2-step_time,s,m,2048,8,16,step_time,3,s,\n"
    )
    found, skipped = read_configurations(write(tmp_path, text))
    assert [c.id for c in found] == ["x-1", "x-2"]
    assert found[0].row_ids == ("x-1-step_time", "x-1-mfu")
    assert found[0].notes == "slow; fast"
    assert found[0].whole("gbs") == 16
    assert skipped == ()


def test_numbered_rows_are_one_run_where_their_columns_agree(tmp_path: Path) -> None:
    text = HEAD + (
        "y-0001,s,m,2048,8,16,step_time,250,ms,\n"
        "y-0002,s,m,2048,8,16,peak_mem_gib,3,GiB,\n"
        "y-0003,s,m,4096,8,16,step_time,500,ms,\n"
    )
    found, _ = read_configurations(write(tmp_path, text))
    assert [(c.id, len(c.metrics)) for c in found] == [("y-0001", 2), ("y-0003", 1)]
    assert found[0].value("step_time") == pytest.approx(0.25)
    assert found[0].value("peak_mem_gib") == 3 * 2**30


# 1,024 sequences of 4,096 tokens on 256 GPUs: 4,194,304 tokens a step.
@pytest.mark.parametrize(
    ("metric", "value", "step_s"),
    [
        ("step_time", 1.5, 1.5),
        ("tokens_per_s", 2_097_152.0, 2.0),
        ("tokens_per_s_per_gpu", 4096.0, 4.0),
        ("samples_per_s", 128.0, 8.0),
    ],
)
def test_each_metric_gives_the_step_that_it_means(
    metric: str, value: float, step_s: float
) -> None:
    found = step_seconds(made(**{metric: value}), 1024 * 4096, 1024, 256)
    assert found == (pytest.approx(step_s), metric)


def test_the_step_time_is_preferred_and_other_metrics_give_none() -> None:
    both = made(tokens_per_s=1.0, step_time=7.0)
    assert step_seconds(both, 100, 1, 1) == (7.0, "step_time")
    assert step_seconds(made(forward_ms=3.0, mfu=40.0), 100, 1, 1) is None


@pytest.mark.parametrize(
    ("unit", "value", "si"),
    [("ms", "250", 0.25), ("min", "2", 120.0), ("", "3", 3.0), ("s", "1,200", 1200.0)],
)
def test_units_of_time(tmp_path: Path, unit: str, value: str, si: float) -> None:
    row = f'z-step_time,s,m,2048,8,16,step_time,"{value}",{unit},\n'
    found, _ = read_configurations(write(tmp_path, HEAD + row))
    assert found[0].value("step_time") == pytest.approx(si)


@pytest.mark.parametrize(
    ("metric", "unit", "size"),
    [
        ("peak_mem_gb", "GB", 2_000_000_000),
        ("peak_mem_gib", "GiB", 2_147_483_648),
        ("peak_mem_mib", "MiB", 2_097_152),
        ("peak_alloc_bytes", "bytes", 2),
        ("peak_mem_gib", "", 2_147_483_648),
    ],
)
def test_units_of_memory(tmp_path: Path, metric: str, unit: str, size: float) -> None:
    row = f"z-{metric},s,m,2048,8,16,{metric},2,{unit},\n"
    found, _ = read_configurations(write(tmp_path, HEAD + row))
    assert found[0].value(metric) == size


@pytest.mark.parametrize("value", ["", "nan", "inf", "-1", "0", "fast", "1e400"])
def test_a_row_without_a_positive_number_is_skipped_with_its_reason(
    tmp_path: Path, value: str
) -> None:
    row = f"z-step_time,s,m,2048,8,16,step_time,{value},s,\n"
    found, skipped = read_configurations(write(tmp_path, HEAD + row))
    assert found == ()
    assert skipped[0][0] == "z-step_time"
    assert "no positive number" in skipped[0][1]
    assert positive(value) is None


def test_an_unknown_unit_and_a_missing_metric_are_skipped(tmp_path: Path) -> None:
    text = HEAD + "a-step_time,s,m,1,1,1,step_time,1,fortnights,\nb,s,m,1,1,1,,1,s,\n"
    found, skipped = read_configurations(write(tmp_path, text))
    assert found == ()
    assert dict(skipped).keys() == {"a-step_time", "b"}


def test_memory_is_told_apart_by_what_was_measured() -> None:
    gib = 2.0**30
    assert memory_by_definition(made(peak_alloc_bytes=gib, alloc_bytes=gib / 2)) == {
        "allocated": gib, "resident": gib / 2,
    }  # fmt: skip
    assert memory_by_definition(made(peak_alloc_gib=gib, peak_mem_gib=2 * gib)) == {
        "allocated": gib, "reserved": 2 * gib,
    }  # fmt: skip
    for words, definition in (
        ({"notes": "memory = nvidia-smi style reading"}, "smi"),
        ({"source": "mlcommons/training_results_v5.0:X"}, "callback"),
        ({"framework": "torchtitan"}, "reserved"),
        ({"framework": "InternEvo"}, "smi"),
        ({"notes": "rank-0 peak allocated"}, "allocated"),
        ({}, "unknown"),
    ):
        assert memory_by_definition(made(**words, peak_mem_gb=gib)) == {definition: gib}  # type: ignore[arg-type]
    assert memory_by_definition(made(cpu_mem_gb=gib, step_time=1.0)) == {}


def test_what_is_no_table_is_an_input_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_configurations(tmp_path / "none.csv")
    with pytest.raises(InputError, match="needs the columns metric, value"):
        read_configurations(write(tmp_path, "a,b\n1,2\n"))
    with pytest.raises(InputError, match="not a table"):
        read_configurations(write(tmp_path, ""))


def test_missing_columns_and_broken_lines_leave_the_rest(tmp_path: Path) -> None:
    text = "metric,value\nstep_time,2\nstep_time,3,4,5\nstep_time,5\n"
    found, _ = read_configurations(write(tmp_path, text))
    assert [c.value("step_time") for c in found] == [2.0, 5.0]
