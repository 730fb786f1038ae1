"""What a run leaves behind when it cannot go on, and when it is asked to stop."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import RunFailedError, launch
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

pytestmark = pytest.mark.slow

# Python runs a module of this name at its start: rank 1 gets a fault in its second step.
FAULT = """
import os
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RUN_ID"):
    import flopwright.executor.train.trial as trial
    run_step = trial.Trial.run_step
    def faulty(self, step, **options):
        if step == 1:
            raise ValueError("the seventh seal is broken")
        return run_step(self, step, **options)
    trial.Trial.run_step = faulty
"""

# Rank 0 falls asleep before its second step, as one that hangs would.
SLEEP = """
import os, time
if os.environ.get("RANK") == "0" and os.environ.get("TORCHELASTIC_RUN_ID"):
    import flopwright.executor.train.trial as trial
    run_step = trial.Trial.run_step
    def sleepy(self, step, **options):
        if step == 1:
            time.sleep(600)
        return run_step(self, step, **options)
    trial.Trial.run_step = sleepy
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload.model_copy(
        update={"seq_len": 16, "global_batch_size": 4, "total_tokens": 16 * 4 * 40}
    )
    scenario = scenario.model_copy(update={"workload": workload})
    path = tmp_path / "pp2.yaml"
    path.write_text(dump_yaml(make_plan_file(scenario, ParallelPlan(pp=2), "pp2")))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 1000)
    return path


def test_a_rank_that_raises_is_named_with_its_cause(
    plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(FAULT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    options = LaunchOptions(steps=4, text=text, tokenizer="characters", nproc=2)
    with pytest.raises(RunFailedError) as caught:
        launch([plan], tmp_path / "out", options)
    message = str(caught.value)
    assert "rank 1 failed: ValueError: the seventh seal is broken" in message
    assert str(tmp_path / "out") in message
    assert list((tmp_path / "out" / "logs").rglob("*.log"))
    assert not list((tmp_path / "out").glob("measurement*"))


def test_a_rank_that_waits_too_long_names_rank_group_and_action(
    plan: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SLEEP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    options = LaunchOptions(
        steps=4, text=text, tokenizer="characters", nproc=2, collective_timeout_s=3
    )
    begin = time.monotonic()
    with pytest.raises(RunFailedError) as caught:
        launch([plan], tmp_path / "out", options)
    assert (
        "rank 1 failed: HungError: has waited 3 s in RECV_F(1,0) of step 1 of plan 'pp2', "
        "in group pp (ranks 0, 1), for rank 0"
    ) in str(caught.value)
    assert time.monotonic() - begin < 300  # rank 0 would sleep on for longer


def test_text_that_cannot_be_used_leaves_nothing(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    options = LaunchOptions(steps=2, text=tmp_path / "empty", nproc=2)
    with pytest.raises(InputError):
        launch([plan], tmp_path / "out", options)
    assert not (tmp_path / "out").exists()


def test_a_run_asked_to_stop_writes_everything(plan: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    def stop_soon(event: dict[str, Any]) -> None:
        if "plan" in event:
            (out / "stop").touch()

    options = LaunchOptions(steps=4000, text=text, tokenizer="characters", nproc=2)
    result = launch([plan], out, options, stop_soon)
    done = len(result.measurements[0].losses)
    assert result.stopped_early
    assert 4 <= done < 4000
    assert done % options.steps_per_round == 0
    _, manifest = load_full(result.checkpoints["pp2"])
    assert manifest.step == done
    assert os.environ.get("RANK") is None


def start_long_run(plan: Path, text: Path, out: Path) -> subprocess.Popen[str]:
    """Starts the command line on a run that would take hours; returns once steps are made."""
    command = [sys.executable, "-m", "flopwright", "run", str(plan), "--out", str(out)]
    command += ["--text", str(text), "--tokenizer", "characters", "--steps", "100000"]
    process = subprocess.Popen(
        [*command, "--nproc", "2", "--no-store"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    progress, deadline = out / "progress.jsonl", time.monotonic() + 300
    while not (progress.exists() and '"plan"' in progress.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return process


def ranks_of(out: Path) -> list[str]:
    """Returns the processes that still work on the run of a folder (Linux)."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        if str(out / "request.json") in words:
            found.append(path.parent.name)
    return found


def test_ctrl_c_ends_the_run_with_everything_written(
    plan: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start_long_run(plan, text, out)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    assert "stopped early" in output
    weights, manifest = load_full(out / "checkpoint-pp2")
    assert manifest.step >= 4
    assert weights
    assert (out / "measurement-pp2.json").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_second_ctrl_c_ends_it_at_once_and_leaves_no_rank(
    plan: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start_long_run(plan, text, out)
    assert len(ranks_of(out)) >= 3  # torchrun and two ranks
    process.send_signal(signal.SIGINT)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=300)[0]
    assert process.returncode in {0, 130}, output  # 0: the round ended first
    deadline = time.monotonic() + 60
    while ranks_of(out) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not ranks_of(out)
    for line in (out / "steps.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_torchrun_killed_alone_ends_the_run_with_a_word_and_leaves_no_rank(
    plan: Path, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = start_long_run(plan, text, out)
    (torchrun,) = [p for p in ranks_of(out) if parent_of(p) == process.pid]
    os.kill(int(torchrun), signal.SIGKILL)
    output = " ".join(process.communicate(timeout=300)[0].split())
    assert process.returncode == 1, output
    assert "torchrun was killed by SIGKILL before a rank could say why" in output
    assert re.search(r"plan 'pp2' was last heard of after \d+ of 100000 steps", output), output
    assert "Traceback" not in output
    deadline = time.monotonic() + 60
    while ranks_of(out) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not ranks_of(out)


def parent_of(process: str) -> int:
    """Returns the process that started another one (Linux)."""
    status = (Path("/proc") / process / "status").read_text()
    return int(status.partition("PPid:")[2].split()[0])
