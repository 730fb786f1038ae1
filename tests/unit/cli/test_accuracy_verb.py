"""`flopwright accuracy` on a small file of measured runs made up here."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from flopwright.cli import main
from flopwright.simulator.accuracy.rows import COLUMNS
from flopwright.store.frame_files import read_table

RUN = {
    "source": "somebody/benchmarks:README.md", "year": "2025", "model": "Llama3-8B",
    "hidden": "4096", "layers": "32", "heads": "32", "kv_heads": "8", "ffn": "14336",
    "vocab": "128256", "seq": "8192", "gpu": "H100-80GB", "n_gpus": "8", "tp": "1", "pp": "1",
    "cp": "1", "mbs": "1", "gbs": "128", "recompute": "none", "precision": "BF16",
    "framework": "NeMo/Megatron-Core", "zero_or_fsdp": "dist-opt", "metric": "step_time",
    "unit": "s",
}  # fmt: skip


@pytest.fixture
def table(tmp_path: Path) -> Path:
    rows = [
        {"id": "a-step_time", "value": "12.0", **RUN},
        {"id": "b-step_time", "value": "6.5", **RUN, "gbs": "64"},
        {"id": "c-step_time", "value": "9.0", **RUN, "gpu": "TPU v5e"},
        {"id": "d-step_time", "value": "9.0", **RUN, "gpu": "no such processor"},
        {"id": "e-step_time", "value": "40", **RUN, "framework": "Nobody's Trainer 7"},
    ]
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["accuracy", *arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(*arguments, "--json", "-") == 0
    data: dict[str, Any] = json.loads(capsys.readouterr().out)
    return data


def test_the_report_as_json(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, str(table), "--by", "source,gpu,model")
    assert data["overall"]["n"] == 3
    assert data["overall"]["coverage"] == pytest.approx(3 / 4)
    assert {s["id"] for s in data["skipped"]} == {"c-step_time", "d-step_time"}
    assert all(run["predicted_s"] > 0 for run in data["runs"])
    assert any("h100_sxm" in name for name in data["groups"])
    assert set(data["baselines"]) == {"constant_mfu", "flat_gemm"}
    wide, narrow = (r for r in data["runs"] if r["id"] in ("a", "e"))
    known, unknown = sorted((wide, narrow), key=lambda r: r["id"])
    share = [r["interval80_s"][1] / r["predicted_s"] for r in (known, unknown)]
    assert share[1] > share[0]


def test_files_are_written(
    table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pyarrow")
    out, png = tmp_path / "out.json", tmp_path / "out.png"
    rows = tmp_path / "out.parquet"
    assert run(str(table), "--json", str(out), "--png", str(png), "--table", str(rows)) == 0
    assert read_table(rows)["source"].tolist()[:2] == ["published", "predicted"]
    assert json.loads(out.read_text())["overall"]["n"] == 3
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "free parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ("/no/such/file.csv",),
        ("{table}", "--by", "colour"),
        ("{table}", "--cross-validate", "row"),
        ("{table}", "--png", "picture.jpg"),
        ("{table}", "--table", "runs.csv"),
        ("{table}", "--kind", "rl", "--table", "runs.parquet"),
    ],
)
def test_bad_input_ends_with_exit_code_2(arguments: tuple[str, ...], table: Path) -> None:
    assert run(*(a.replace("{table}", str(table)) for a in arguments)) == 2


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("colour,size\nred,3\n")
    assert run(str(path)) == 2


def test_folds_on_a_small_file(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = report(capsys, str(table), "--cross-validate", "stack")
    assert data["overall"]["n"] == 3
    assert data["protocol"].startswith("each software stack")
    assert all(b["n"] == 3 for b in data["baselines"].values())
