"""`launch` with resume: another plan, another world, broken checkpoints, foreign folders."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import launch
from flopwright.models.hf.read import open_checkpoint
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file

pytestmark = pytest.mark.slow
STEPS = 8


def plan(folder: Path, name: str, parallel: ParallelPlan, **changes: int) -> Path:
    base = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = base.workload.model_copy(
        update={"seq_len": 16, "global_batch_size": 4, "total_tokens": 640} | changes
    )
    model = base.model.model_copy(update={"num_layers": 2, "vocab_size": 64})
    scenario = base.model_copy(update={"workload": workload, "model": model})
    path = folder / f"{name}.yaml"
    path.write_text(dump_yaml(make_plan_file(scenario, parallel, name)))
    return path


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LaunchOptions]:
    """A run of two ranks that made four steps, and its options."""
    folder = tmp_path_factory.mktemp("resumed")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 500)
    options = LaunchOptions(
        text=folder / "text.txt",
        tokenizer="characters",
        steps=4,
        checkpoint_every=2,
        steps_per_round=2,
        nproc=2,
    )
    launch([plan(folder, "dp2", ParallelPlan(dp_shard=2, zero_stage=1))], folder / "run", options)
    return folder, options


def test_another_workload_or_seed_is_refused(stopped: tuple[Path, LaunchOptions]) -> None:
    folder, options = stopped
    again = replace(options, resume=True, steps=STEPS)
    other = plan(folder, "other", ParallelPlan(dp_shard=2), seq_len=8)
    with pytest.raises(InputError, match="workload"):
        launch([other], folder / "run", again)
    with pytest.raises(InputError, match="seed"):
        launch([folder / "dp2.yaml"], folder / "run", replace(again, seed=77))
    with pytest.raises(InputError, match="--resume"):
        launch([folder / "dp2.yaml"], folder / "run", replace(again, resume=False))


def test_a_broken_checkpoint_is_named_and_nothing_changes(
    stopped: tuple[Path, LaunchOptions],
) -> None:
    folder, options = stopped
    shard = folder / "run" / "checkpoint-dp2" / "step-00000002" / "rank-00001.safetensors"
    whole, last = shard.read_bytes(), folder / "run" / "checkpoint-dp2" / "step-00000004"
    away = last.rename(folder / "away")  # the checkpoint before it is then the last one
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(InputError, match=r"rank-00001\.safetensors.*altered"):
        launch([folder / "dp2.yaml"], folder / "run", replace(options, resume=True, steps=STEPS))
    assert load_full(away)[1].step == 4
    shard.write_bytes(whole)
    away.rename(last)


def test_another_plan_and_world_goes_on_and_exports(stopped: tuple[Path, LaunchOptions]) -> None:
    folder, options = stopped
    alone = plan(folder, "one", ParallelPlan())
    result = launch(
        [alone],
        folder / "run",
        replace(options, resume=True, steps=STEPS, nproc=1, export_hf=True),
    )
    (measured,) = result.measurements
    rows = [json.loads(t) for t in (folder / "run" / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert measured.plan_name == "dp2"  # results go on under the run's name
    assert list(measured.losses) == [row["loss"] for row in rows]
    whole = launch([alone], folder / "whole", replace(options, steps=STEPS, nproc=1))
    theirs = whole.measurements[0].losses
    for mine, other in zip(measured.losses, theirs, strict=True):
        assert abs(mine - other) <= 1e-5 * other
    again = launch([alone], folder / "run", replace(options, resume=True, steps=STEPS, nproc=1))
    assert again.measurements == result.measurements  # done: only read
    assert open_checkpoint(folder / "run" / "hf-dp2").spec.vocab_size == 64
