"""The exported batch script against a real Slurm with pretend nodes (`.ci/slurm.sh`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.sbatch import sbatch_script
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario, make_plan_file

Submit = Callable[[str], tuple[bool, str]]


@pytest.fixture
def submit(need_service: Callable[[str, bool, str], None], tmp_path: Path) -> Submit:
    """Returns script -> (whether `sbatch --test-only` takes it, its words)."""
    config = os.environ.get("FLOPWRIGHT_TEST_SLURM_CONF", "")
    how = "apt-get install slurm-wlm munge, then . .ci/slurm.sh; start_slurm (as root)"
    need_service("Slurm", bool(config), how)

    def test_only(script: str) -> tuple[bool, str]:
        path = tmp_path / "sbatch.sh"
        path.write_text(script)
        done = subprocess.run(
            ["sbatch", "--test-only", str(path)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "SLURM_CONF": config},
        )
        return done.returncode == 0, done.stderr

    return test_only


@pytest.fixture(scope="module")
def k2() -> tuple[PlanFile, str]:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    parallel = ParallelPlan(
        pp=16, ep=16, dp_shard=128, zero_stage=1, recompute="selective", fp8_activations=True
    )
    plan = make_plan_file(scenario, parallel, "k2")
    prediction, _ = predict(scenario, parallel, name="k2")
    return plan, sbatch_script(plan, prediction)


@pytest.mark.slow
def test_slurm_takes_the_script_of_2048_gpus(submit: Submit, k2: tuple[PlanFile, str]) -> None:
    _, script = k2
    assert "#SBATCH --nodes=256\n" in script
    accepted, words = submit(script)
    assert accepted, words


MISTAKES = (
    ("--nodes=256", "--nodes=257"),
    ("--gpus-per-node=8", "--gpus-per-node=9"),
    ("--gpus-per-node=8", "--gpus-per-node=h200:8"),
    ("--ntasks-per-node=1", "--ntasks-per-node=1000"),
    ("--exclusive", "--exclusively"),
    ("--exclusive", "--exclusive\n#SBATCH --partition=moon"),
    ("--exclusive", "--exclusive\n#SBATCH --cpus-per-task=1000"),
    ("--nodes=256", "--nodez=256"),
    ("--mem=0", "--mem=64T"),
    ("--time=", "--time=soon"),
)


@pytest.mark.slow
def test_slurm_refuses_what_it_cannot_run(submit: Submit, k2: tuple[PlanFile, str]) -> None:
    _, script = k2
    missed = []
    for there, instead in MISTAKES:
        assert there in script
        accepted, _ = submit(script.replace(there, instead, 1))
        if accepted:
            missed.append(instead)
    assert not missed
