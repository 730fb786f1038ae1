"""What someone sees who starts the ranks with torchrun, as the exported scripts do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flopwright.executor.launch.commands import rank_environment
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

pytestmark = pytest.mark.slow

# Python runs a module of this name at its start: rank 1 gets a fault in its second step.
SITE = """
import os
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RUN_ID"):
    import flopwright.executor.train.trial as trial
    run_step = trial.Trial.run_step
    def faulty(self, step, **options):
        if step == 1:
            FAULT
        return run_step(self, step, **options)
    trial.Trial.run_step = faulty
"""

# Rank 1 is given another seed.
OTHER = """
import argparse, os
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RUN_ID"):
    parse_args = argparse.ArgumentParser.parse_args
    def other(self, *args, **options):
        parsed = parse_args(self, *args, **options)
        parsed.seed = 5
        return parsed
    argparse.ArgumentParser.parse_args = other
"""


def write_plan(folder: Path, **axes: Any) -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload.model_copy(
        update={"seq_len": 16, "global_batch_size": 4, "total_tokens": 16 * 4 * 40}
    )
    scenario = scenario.model_copy(update={"workload": workload})
    plan = make_plan_file(scenario, ParallelPlan(**axes), "mine")
    (folder / "plan.yaml").write_text(dump_yaml(plan))
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 1000)


def start(folder: Path, *more: str, steps: int = 4) -> subprocess.CompletedProcess[str]:
    arguments = [
        "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2", "--max-restarts=0",
        "--log-dir=run/logs", "--tee=3", "--local-ranks-filter=0",
        "-m", "flopwright.executor.train.worker", "--plan", "plan.yaml", "--out", "run",
        "--text", "text.txt", "--tokenizer", "characters", "--steps", str(steps), *more,
    ]  # fmt: skip
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        cwd=folder, env=rank_environment(os.environ, "cpu"),
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def said_by_ranks(stderr: str) -> list[str]:
    """Returns the shown ranks' own lines; torchrun puts the rank's name before each."""
    lines = [line.partition("]:")[2] for line in stderr.splitlines() if line.startswith("[")]
    return [line for line in lines if line]


def test_progress_is_shown_and_a_second_run_is_refused(tmp_path: Path) -> None:
    write_plan(tmp_path, pp=2)
    done = start(tmp_path, steps=24)
    assert done.returncode == 0, done.stderr
    said = said_by_ranks(done.stderr)
    assert "train" in said
    at = [line.partition(",")[0] for line in said if line.startswith("mine: step")]
    assert at == ["mine: step 4/24", "mine: step 20/24", "mine: step 24/24"]
    assert said[-1] == "done, everything is in run"

    rows = [json.loads(x) for x in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    peaks = [row["peak_memory_bytes"] for row in rows if "peak_memory_bytes" in row]
    measurement = json.loads((tmp_path / "run" / "measurement-mine.json").read_text())
    stages = measurement["metrics"]["memory_bytes"]
    assert peaks == [max(sum(stage.values()) for stage in stages)]

    again = start(tmp_path)
    assert again.returncode != 0
    assert "--out (run): the folder already holds a run (steps.jsonl)" in again.stderr
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 24
    assert not (tmp_path / "run" / "errors").exists()


def test_a_run_is_saved_on_the_way_and_gone_on_with(tmp_path: Path) -> None:
    write_plan(tmp_path, dp_shard=2, data_parallel="none")
    saving = ("--checkpoint-every", "4", "--resume")
    first = start(tmp_path, *saving, steps=8)  # there is nothing to resume: it begins
    assert first.returncode == 0, first.stderr
    losses = [json.loads(x)["loss"] for x in (tmp_path / "run" / "steps.jsonl").open()]
    assert len(losses) == 8
    assert (tmp_path / "run" / "checkpoint-mine" / "step-00000004").is_dir()

    more = start(tmp_path, *saving, steps=12)
    assert more.returncode == 0, more.stderr
    both = [json.loads(x)["loss"] for x in (tmp_path / "run" / "steps.jsonl").open()]
    assert both[:8] == losses
    assert len(both) == 12

    other = start(tmp_path, *saving, "--seed", "9", steps=16)
    assert other.returncode != 0
    assert "seed (9): the run in this folder was started with" in other.stderr


def test_a_refused_plan_is_told_with_every_violation(tmp_path: Path) -> None:
    write_plan(tmp_path, dp_shard=2, zero_stage=2, data_parallel="none", optimizer_offload=True)
    done = start(tmp_path)
    assert done.returncode != 0
    said = said_by_ranks(done.stderr)
    begin = said.index("2 problems with the input:")
    assert [line.strip().partition(": ")[2] for line in said[begin + 1 : begin + 3]] == [
        "parallel.data_parallel (none): this executor does not run it; use deepspeed or fsdp2, "
        "or zero_stage 0",
        "parallel.gradient_offload (false): this executor does not run it; use true: sums of "
        "gradients stand where their optimizer runs",
    ]
    assert said[begin + 3 :] == ["more in run/errors"]
    # torchrun's report, which comes last, names the cause too
    report = done.stderr[done.stderr.index("Root Cause") :]
    assert "parallel.data_parallel (none)" in report
    assert "exitcode  : 2" in report
    assert list((tmp_path / "run" / "errors").iterdir())

    # nothing of the failed start stands in a second one's way
    write_plan(tmp_path, pp=2)
    (tmp_path / "run" / "stop").touch()
    assert start(tmp_path, steps=8).returncode == 0
    assert not list((tmp_path / "run" / "errors").iterdir())
    assert len((tmp_path / "run" / "steps.jsonl").read_text().splitlines()) == 8


@pytest.mark.parametrize(
    ("fault", "in_report"),
    [
        (
            'raise ValueError("the seventh seal is broken")',
            "rank 1 failed: ValueError: the seventh seal is broken",
        ),
        ("os.kill(os.getpid(), 9)", "Signal 9 (SIGKILL)"),
    ],
    ids=["raises", "killed"],
)
def test_the_rank_that_failed_is_named(
    fault: str, in_report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(tmp_path, pp=2)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE.replace("FAULT", fault))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    done = start(tmp_path)
    assert done.returncode != 0
    report = done.stderr[done.stderr.index("Root Cause") :]
    assert in_report in report
    assert "rank      : 1" in report
    # rank 0's output is the only one shown: the error it met itself is not what it tells
    said = said_by_ranks(done.stderr)
    assert not any("rank 0 failed" in line for line in said), said
    assert not any("Traceback" in line for line in said), said
    # one that is killed says nothing: who misses it says in which step
    text = "\n".join(said) if "SIGKILL" in in_report else report
    assert re.search(r"in step [01] of plan 'mine'", text), text


def test_ranks_with_different_plans_do_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two nodes of which one has an older file."""
    write_plan(tmp_path, pp=2)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(OTHER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    done = start(tmp_path)
    assert done.returncode != 0
    assert "ranks 1 were started with another plan or other options than rank 0" in done.stderr
    assert not (tmp_path / "run" / "steps.jsonl").exists()
