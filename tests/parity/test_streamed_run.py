"""A run that streams its text, packs documents and ramps its batch; its data worker is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import RunFailedError, launch
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file
from flopwright.spec.packing import Packing
from flopwright.spec.phases import BatchRamp

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc"),
]
STEPS = 18  # 6 of 4 sequences, 12 of 8


def plan_file(folder: Path) -> Path:
    base = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = base.workload.model_copy(
        update={
            "seq_len": 32,
            "global_batch_size": 8,
            "total_tokens": 32 * (6 * 4 + 12 * 8),
            "batch_ramp": BatchRamp(start=4, increment=4, tokens=32 * 6 * 4),
            "packing": Packing(),
        }
    )
    assert workload.num_steps == STEPS
    model = base.model.model_copy(update={"num_layers": 2, "vocab_size": 128})
    scenario = base.model_copy(update={"workload": workload, "model": model})
    plan = ParallelPlan(dp_shard=2, micro_batch_size=2, zero_stage=1)
    (folder / "plan.yaml").write_text(dump_yaml(make_plan_file(scenario, plan, "streamed")))
    return folder / "plan.yaml"


def data_workers(out: Path) -> list[int]:
    """Returns the data workers of the run in a folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if b"flopwright.executor.data.worker" in command and str(out).encode() in command:
            found.append(int(path.parent.name))
    return found


def steps(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def test_a_killed_data_worker_is_named_and_the_run_goes_on_with_the_same_data(
    tmp_path: Path,
) -> None:
    lines = [json.dumps({"text": f"record {i}: " + "so it goes " * (i % 9)}) for i in range(900)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    out, killed = tmp_path / "out", []

    def kill_one(event: dict[str, Any]) -> None:
        if event.get("step", 0) >= 10 and not killed:
            killed.append(min(data_workers(out)))
            os.kill(killed[0], signal.SIGKILL)

    options = LaunchOptions(
        text=tmp_path / "text.jsonl",
        tokenizer="characters",
        stream=True,
        nproc=2,
        steps_per_round=2,
        checkpoint_every=4,
    )
    with pytest.raises(RunFailedError) as caught:
        launch([plan_file(tmp_path)], out, options, kill_one)
    said = str(caught.value)
    assert f"(process {killed[0]}) was killed by SIGKILL before it had read step" in said
    assert "data worker of rank" in said
    before = steps(out)
    assert 10 <= len(before) < STEPS
    result = launch([plan_file(tmp_path)], out, replace(options, resume=True))
    after = steps(out)
    assert [row["step"] for row in after] == list(range(STEPS))
    assert [row["sequences"] for row in after] == [4] * 6 + [8] * 12
    for old, new in zip(before, after, strict=False):  # those behind the checkpoint were made anew
        assert old["loss"] == new["loss"]
    measurement = result.measurements[0]
    assert measurement.held_out_loss is not None
    assert after[-1]["loss"] < after[0]["loss"] - 1
    assert len(measurement.step_time_samples_s) <= 12
    assert not data_workers(out)
