"""The two commands for a GPU, tried on one CPU core: they run, and say what they are not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def _run(name: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / name), "--device", "cpu", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_gpu_check(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    parts = ("correctness", "curves")  # speed is the other command's
    found = _run("gpu_check.py", "--seed", "3", "--out", str(out), "--only", *parts)
    assert json.loads(out.read_text(encoding="utf-8")) == found
    assert found["measured_on_a_gpu"] is False
    checks = found["correctness"]
    assert checks["failed"] == []
    folders = {p.parent.name for p in BENCHMARKS.parent.glob("kernels/*/kernel.py")}
    assert folders <= {o["op"].split()[0] for o in checks["ops"]}
    points = found["curves"]["probe"]["operators"]
    assert {"grouped_gemm", "attention", "memory_bound"} <= {p["kind"] for p in points}
    assert found["curves"]["calibration"]["curves"]


@pytest.mark.slow
def test_kernels_benchmark(tmp_path: Path) -> None:
    found = _run("kernels.py", "--budget", "20")
    assert found["note"].startswith("not measured on a GPU")
    assert found["choices"] == {}
    assert not [r for r in found["rows"] if "error" in r]
    by_op = {r["op"] for r in found["rows"]}
    assert {"attention", "grouped_gemm", "linear_cross_entropy", "kda"} <= by_op
    for row in found["rows"]:
        assert row["forward_s"] > 0


def test_the_quicker_kernel_is_chosen_with_its_reason() -> None:
    from flopwright.kernels.checks.timing import Floor, choices

    def row(op: str, kernel: str, seconds: float) -> dict[str, Any]:
        return {"op": op, "kernel": kernel, "forward_s": seconds / 3, "both_s": seconds}

    rows = [
        row("attention", "triton", 2.0),
        row("attention", "triton", 3.0),
        row("attention", "library", 1.0),
        row("attention", "library", 3.0),
        row("attention", "torch", 0.1),  # no kernel that the dispatcher knows
        row("rope", "triton", 1.0),
    ]
    found = choices(rows, "measured today")
    assert found == {
        "attention": {
            "kernel": "library",
            "reason": "1.25 times as fast as the other, forward and backward, measured today",
        }
    }
    assert Floor(100.0, 10.0).seconds(200.0, 10.0) == 2.0
    assert Floor(100.0, 10.0).seconds(200.0, 50.0) == 5.0
