"""`flopwright sweep` as users call it."""

import json
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
import yaml

import flopwright.planner.sweep as planner
from flopwright.cli import main
from flopwright.spec.load import load_scenario


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    data = load_scenario("kimi_k2_mini_2cpu_fp32").to_data()
    data["sweep"] = {"workload.seq_len": [64, 128, 256]}
    path = tmp_path / "grid.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["sweep", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def test_writes_a_table_and_prints_it(grid: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "new" / "sweep.parquet"
    code, text, _ = _run(capsys, str(grid), "--out", str(out))
    assert code == 0
    assert "(3 of 3 points)" in text
    frame = pd.read_parquet(out)
    assert frame["workload.seq_len"].tolist() == [64, 128, 256]
    assert (frame["verdict"] == "fits").all()


def test_json_holds_every_row(grid: Path, tmp_path: Path, capsys) -> None:
    code, text, _ = _run(capsys, str(grid), "--out", str(tmp_path / "s.parquet"), "--json")
    assert code == 0
    data = json.loads(text)
    assert data["points"] == data["done"] == 3
    assert [r["values"]["workload.seq_len"] for r in data["rows"]] == [64, 128, 256]


def test_an_interrupt_keeps_the_rows_that_are_done(
    grid: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    real = planner.run_sweep

    def interrupted(*arguments, **options) -> Iterator[planner.SweepRow]:
        rows = real(*arguments, **options)
        yield next(rows)
        yield next(rows)
        raise KeyboardInterrupt

    monkeypatch.setattr(planner, "run_sweep", interrupted)
    out = tmp_path / "s.parquet"
    code, text, _ = _run(capsys, str(grid), "--out", str(out))
    assert code == 130
    assert "(2 of 3 points)" in text
    assert pd.read_parquet(out)["workload.seq_len"].tolist() == [64, 128]


def test_bad_input_writes_nothing(grid: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "s.csv"
    code, _, err = _run(capsys, str(grid), "--out", str(out))
    assert code == 2
    assert "Parquet" in err
    out = tmp_path / "s.parquet"
    code, _, err = _run(capsys, "kimi_k2_mini_2cpu_fp32", "--out", str(out))
    assert code == 2
    assert "sweeps nothing" in err
    assert not out.exists()
