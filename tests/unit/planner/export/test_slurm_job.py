"""What the exported batch script does while its job runs, with stand-ins for Slurm's programs."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from flopwright.plan.file import PlanFile
from flopwright.planner.export.env import env_script
from flopwright.planner.export.sbatch import (
    ENDING_STEPS,
    STOP_FILE,
    checkpoint_steps,
    sbatch_script,
    warning_s,
)
from flopwright.report.metrics import Prediction
from flopwright.spec.load import make_plan_file

SCONTROL = """
case "$1" in
  show) echo gpu001 ;;
  requeue) echo "$2" >> requeued ;;
esac
"""
# A stand-in for srun: trains until it is told to stop, and ends as the test says.
SRUN = """
touch started
until [ -e "$TRAINS_IN/stop-now" ]; do sleep 0.05; done
exit "$ENDS_WITH"
"""


@pytest.mark.parametrize(
    ("arguments", "ends_with", "requeued"),
    [
        ([], 0, True),
        (["--text", "books", "--out", "other"], 0, True),
        (["--out=other", "--steps", "9"], 0, True),
        ([], 1, False),  # what failed is not tried again
        ([], 143, False),
    ],
)
def test_a_job_that_is_told_to_end_saves_and_queues_itself_again(
    arguments: list[str],
    ends_with: int,
    requeued: bool,
    k2: PlanFile,
    prediction: Prediction,
    tmp_path: Path,
) -> None:
    folder = "other" if arguments else "run"
    (tmp_path / folder).mkdir()
    job = _started(k2, prediction, tmp_path, arguments, TRAINS_IN=folder, ENDS_WITH=str(ends_with))
    try:
        job.terminate()
        assert job.wait(timeout=60) == ends_with
    finally:
        job.kill()
    again = tmp_path / "requeued"
    assert (again.read_text() if again.exists() else "") == ("77\n" if requeued else "")


def test_a_job_ends_as_its_training_does(
    k2: PlanFile, prediction: Prediction, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    job = _started(k2, prediction, tmp_path, [], TRAINS_IN="run", ENDS_WITH="7")
    (tmp_path / "run" / "stop-now").touch()
    assert job.wait(timeout=60) == 7
    assert not (tmp_path / "requeued").exists()


def _started(
    plan: PlanFile, prediction: Prediction, folder: Path, arguments: list[str], **env: str
) -> subprocess.Popen[bytes]:
    """Starts the batch script with stand-ins for Slurm's programs; returns once it trains."""
    (folder / "ENV.sh").write_text(env_script(plan))
    (folder / "sbatch.sh").write_text(sbatch_script(plan, prediction))
    for name, body in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    job = subprocess.Popen(
        ["bash", "sbatch.sh", *arguments],
        cwd=folder,
        env={
            "PATH": f"{folder}:/usr/bin:/bin",
            "SLURM_SUBMIT_DIR": str(folder),
            "SLURM_JOB_NODELIST": "gpu[001-002]",
            "SLURM_NNODES": "256",
            "SLURM_JOB_ID": "77",
            **env,
        },
    )
    while not (folder / "started").exists():
        assert job.poll() is None
        time.sleep(0.02)
    return job


def test_the_job_is_warned_early_enough_to_end_its_steps(
    k2: PlanFile, prediction: Prediction
) -> None:
    from flopwright.executor.launch import request

    assert STOP_FILE == request.STOP_NOW_FILE
    slowest_s = prediction.step_time_interval.high
    assert warning_s(k2, prediction) > 2 * ENDING_STEPS * slowest_s
    few = k2.scenario.workload.tokens_per_step * 10
    workload = k2.scenario.workload.model_copy(update={"total_tokens": few})
    scenario = k2.scenario.model_copy(update={"workload": workload})
    short = make_plan_file(scenario, k2.parallel, "short")
    assert checkpoint_steps(short, prediction) == 10
    assert warning_s(short, prediction) <= 1800
