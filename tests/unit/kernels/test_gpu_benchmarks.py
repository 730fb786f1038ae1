"""The two commands for a GPU, tried on one CPU core: they run, and say what they are not."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from flopwright.kernels.checks.suite import GROUPS

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


# What the check must do without: everything beyond the planning install, torch and triton.
HIDDEN = """
import sys
from importlib.machinery import PathFinder
ABSENT = {"deepspeed", "safetensors", "tokenizers", "pyarrow", "transformers", "scipy", "numba",
          "matplotlib", "plotly", "streamlit", "ray", "hypothesis", "liger_kernel", "fla"}
class Without:
    @staticmethod
    def find_spec(name, path=None, target=None):
        absent = name.split(".")[0] in ABSENT
        return None if absent else PathFinder.find_spec(name, path, target)
sys.meta_path[:] = [Without if f is PathFinder else f for f in sys.meta_path]
"""


def _run(name: str, *arguments: str, folder: Path | None = None) -> dict[str, Any]:
    """Returns what a benchmark prints; `folder` holds a sitecustomize.py for it."""
    command = [sys.executable, str(BENCHMARKS / name), "--device", "cpu", *arguments]
    environment = os.environ | ({} if folder is None else {"PYTHONPATH": str(folder)})
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_gpu_check_needs_this_repository_torch_and_triton_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDDEN, encoding="utf-8")
    out = tmp_path / "check.json"
    parts = ("correctness", "curves", "steps")  # speed is the other command's
    ops = ("balance_histogram", "rms_norm")  # the others have tests of their own
    found = _run("gpu_check.py", "--seed", "3", "--out", str(out), "--only", *parts, "--ops", *ops,
                 folder=tmp_path)  # fmt: skip
    assert json.loads(out.read_text(encoding="utf-8")) == found
    assert found["measured_on_a_gpu"] is False
    checks = found["correctness"]
    assert checks["failed"] == []
    assert {o["op"].split()[0] for o in checks["ops"]} == set(ops)
    points = found["curves"]["probe"]["operators"]
    assert {"grouped_gemm", "attention", "memory_bound"} <= {p["kind"] for p in points}
    assert found["curves"]["calibration"]["curves"]
    for step in found["training_steps"]:
        assert abs(step["memory_error"]) < 0.01


@pytest.mark.parametrize(("failed", "code"), [([], 0), (["kda float32 triton"], 1)])
def test_a_failed_check_is_a_failed_command(
    failed: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    gpu_check = importlib.import_module("gpu_check")
    monkeypatch.setattr(gpu_check, "cluster_here", lambda _: None)
    monkeypatch.setattr(gpu_check, "correctness", lambda *_: {"failed": failed})
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--device", "cpu", "--only", "correctness"])
    with pytest.raises(SystemExit) as ended:
        gpu_check.main()
    assert ended.value.code == code


def test_every_kernel_is_checked() -> None:
    folders = {p.parent.name for p in BENCHMARKS.parent.glob("kernels/*/kernel.py")}
    assert folders <= set(GROUPS)


@pytest.mark.slow
def test_kernels_benchmark(tmp_path: Path) -> None:
    found = _run("kernels.py", "--budget", "60")
    assert found["note"].startswith("not measured on a GPU")
    assert found["choices"] == {}
    assert not [r for r in found["rows"] if "error" in r]
    by_op = {r["op"] for r in found["rows"]}
    assert set(GROUPS) <= by_op  # every kernel
    for row in found["rows"]:
        assert row["forward_s"] > 0


def test_the_quicker_kernel_is_chosen_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from flopwright.kernels import libraries
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
    # A library that is not here, or whose kernel fails, is not taken, and the record says why.
    failing = [*rows, row("attention", "library", 0.1) | {"error": "out of memory"}]
    assert choices(failing, "today")["attention"] == {
        "kernel": "triton", "reason": "out of memory, today"
    }  # fmt: skip
    monkeypatch.setattr(libraries, "installed", lambda package: False)
    assert choices([row("kda", "triton", 1.0)], "today")["kda"] == {
        "kernel": "triton", "reason": "flash-linear-attention is not installed, today"
    }  # fmt: skip
    assert Floor(100.0, 10.0).seconds(200.0, 10.0) == 2.0
    assert Floor(100.0, 10.0).seconds(200.0, 50.0) == 5.0
