"""The campaign of benchmarks/calibration_loop.py in miniature: four plans, one launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "calibration_loop.py"
KEYS = {
    "probe_only_median_error", "calibrated_median_error", "interval80_coverage",
    "memory_max_error", "noise_floor", "n_plans", "machine", "date", "repeats", "spread",
}  # fmt: skip


@pytest.mark.slow
def test_the_loop_probes_runs_learns_and_predicts(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--worlds", "2", "--only", "2", "--steps", "4",
         "--budget", "3", "--draws", "0", "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result) >= KEYS
    assert result["n_plans"] == 4
    two = result["by_world_size"]["2"]
    assert two["n_held_out"] == 2
    assert set(two["learnt_from"]) < set(two["plans"])
    # what can be said without timing: tensors are counted, whatever the machine does
    assert result["memory_max_error"] < 0.01
