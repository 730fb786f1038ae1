"""A user's calibration of one machine moves no prediction of published runs on other hardware."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwright.report.metrics import TIME_CLASSES
from flopwright.simulator.calibration.files import (
    default_calibration,
    own_calibrations,
    save_calibration,
)
from flopwright.spec.load import load_scenario


def write_rows(measured: Path, target: Path) -> None:
    """Writes a row of each kind of GPU whose plan is stated."""
    taken: set[str] = set()
    with (measured / "validation" / "training_runs.csv").open(newline="") as source:
        rows = csv.DictReader(source)
        assert rows.fieldnames is not None
        with target.open("w", newline="") as out:
            writer = csv.DictWriter(out, rows.fieldnames)
            writer.writeheader()
            for row in rows:
                told = row["metric"] in {"step_time", "tokens_per_s_per_gpu"}
                told &= all(row[name] for name in ("tp", "mbs", "gbs"))
                if told and row["gpu"] not in taken:
                    taken.add(row["gpu"])
                    writer.writerow(row)


def predicted(rows: Path, home: Path) -> dict[str, Any]:
    """Returns what `flopwright accuracy` says, in a process that knows of nothing before."""
    done = subprocess.run(
        [sys.executable, "-m", "flopwright", "accuracy", str(rows), "--json", "-"],
        env=os.environ | {"FLOPWRIGHT_HOME": str(home), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.slow
def test_a_calibration_of_this_machine_moves_no_published_run(
    measured_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, home = tmp_path / "rows.csv", tmp_path / "home"
    write_rows(measured_data, rows)
    before = predicted(rows, home)
    assert len(before["runs"]) >= 8

    monkeypatch.setenv("FLOPWRIGHT_HOME", str(home))
    prior = default_calibration(load_scenario("kimi_k2_mini_2cpu_fp32").cluster.node.gpu)
    slow = {
        "id": "cpu-of-mine",
        "stack_id": "mine",
        "hardware_id": "mine",
        "factors": dict.fromkeys(TIME_CLASSES, 3.0),
        "memory_factors": {"weights": 2.0, "activations": 2.0},
        "step_residual_log": 0.01,
        "curves": tuple(c.model_copy(update={"max_efficiency": 0.01}) for c in prior.curves),
    }
    save_calibration(prior.model_copy(update=slow))
    assert [c.id for c in own_calibrations()] == ["cpu-of-mine"]
    assert predicted(rows, home) == before  # every number, bit by bit
