"""Two real ranks: one that is told to end, and one that is lost for good."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.supervisor import Supervision
from flopwright.plan.file import PredictedStep
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_plan, load_scenario, make_plan_file

pytestmark = pytest.mark.slow
STEPS = 8

# Python runs a module of this name at its start: rank 1 dies in its sixth step, every time.
LOST = """
import os, signal
if os.environ.get("RANK") == "1" and os.environ.get("TORCHELASTIC_RUN_ID"):
    import flopwright.executor.train.trial as trial
    run_step = trial.Trial.run_step
    def dying(self, step, **options):
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return run_step(self, step, **options)
    trial.Trial.run_step = dying
"""


def write_plan(folder: Path, name: str, parallel: ParallelPlan, step_s: float) -> Path:
    base = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = base.workload.model_copy(
        update={"seq_len": 16, "global_batch_size": 4, "total_tokens": 16 * 4 * 40}
    )
    model = base.model.model_copy(update={"num_layers": 2, "vocab_size": 64})
    scenario = base.model_copy(update={"workload": workload, "model": model})
    predicted = PredictedStep(
        step_time=f"{step_s} s", interval80_low=f"{step_s} s", interval80_high=f"{step_s} s",
        peak_memory="1 GiB",
        provenance="analytic",
    )  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(dump_yaml(make_plan_file(scenario, parallel, name, predicted)))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 500)
    return path


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_a_run_whose_rank_is_lost_goes_on_with_fewer(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = write_plan(tmp_path, "two", ParallelPlan(dp_shard=2, zero_stage=1), 0.2)
    one = write_plan(tmp_path, "one", ParallelPlan(), 0.35)
    options = LaunchOptions(
        text=text,
        tokenizer="characters",
        checkpoint_every=2,
        steps_per_round=2,
        nproc=2,
        steps=STEPS,
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(LOST)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    said: list[str] = []
    supervise = Supervision(max_restarts=1, fallbacks=lambda _: [load_plan(one)])
    result = supervise([two], tmp_path / "run", options, lambda e: said.append(e.get("phase", "")))
    notes = [text for text in said if "checkpoint of 4 steps" in text]
    # whether or not rank 0 could still say that it misses the other
    assert notes[0].startswith("rank 1 was killed by SIGKILL")
    assert "plan 'two' was last heard of after 4 of 8 steps" in notes[0]
    assert "Starting again from the checkpoint of 4 steps (restart 1 of 1" in notes[0]
    assert (
        "ranks of plan 'two' count as lost. Going on from the checkpoint of 4 steps under 'one' "
        "on 1 rank of 2, the same global batch; predicted step 350 ms instead of 200 ms "
        "(75 % longer)" in notes[1]
    )
    assert len(notes) == 2
    (measured,) = result.measurements
    assert len(measured.losses) == STEPS
    lines = (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["from_step"] for line in lines] == [4, 4]


def start(plan: Path, text: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "flopwright", "run", str(plan), "--out", str(out)]
    command += ["--text", str(text), "--tokenizer", "characters", "--nproc", "2", "--no-store"]
    return subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def ranks_of(out: Path) -> dict[int, int]:
    """Returns the processes of a folder's ranks, by rank (Linux)."""
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            variables = (path / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # it has just ended
            continue
        named = [v.removeprefix("RANK=") for v in variables if v.startswith("RANK=")]
        if str(out / "request.json") in words and named:
            found[int(named[0])] = int(path.name)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_sigterm_to_one_ends_all_ranks_after_a_step_with_a_checkpoint(
    text: Path, tmp_path: Path
) -> None:
    plan = write_plan(tmp_path, "pp2", ParallelPlan(pp=2), 0.2)
    out = tmp_path / "out"
    process = start(plan, text, out, "--steps", "100000", "--checkpoint-every", "50000")
    progress, deadline = out / "progress.jsonl", time.monotonic() + 300
    while not (progress.exists() and '"plan"' in progress.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.kill(ranks_of(out)[1], signal.SIGTERM)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 143, said
    record: dict[str, Any] = json.loads((out / "stopped.json").read_text())
    steps = record["steps"]["pp2"]
    assert record == {"by": "SIGTERM", "rank": 1, "steps": {"pp2": steps}}
    assert f"stopped by SIGTERM (rank 1 was told first): plan 'pp2' after {steps} steps" in said
    rows = (out / "steps.jsonl").read_text().splitlines()
    assert len(rows) == steps
    assert load_full(out / "checkpoint-pp2")[1].step == steps
    assert not (out / "errors").exists()  # no rank failed
    assert not ranks_of(out)
