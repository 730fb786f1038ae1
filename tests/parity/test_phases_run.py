"""A run of two phases for real: other plan, context and positions behind the boundary."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flopwright.errors import InputError
from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import launch
from flopwright.executor.launch.phases import launch_phases, phase_folder
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.phases import PhasePlan, RunPlan, phases_of
from flopwright.spec.attention import YarnScaling
from flopwright.spec.load import dump_yaml, load_scenario
from flopwright.spec.phases import LearningRate, TrainingPhase

pytestmark = pytest.mark.slow
BATCH, FIRST, SECOND = 4, 8, 4
PLANS = (ParallelPlan(dp_shard=2, zero_stage=1), ParallelPlan(pp=2))


def run_plan() -> RunPlan:
    base = load_scenario("kimi_k2_mini_2cpu_fp32")
    rate = LearningRate(kind="linear", peak=1e-2, final=4e-3, warmup_steps=2)
    long = TrainingPhase(
        name="long",
        total_tokens=32 * BATCH * SECOND,
        seq_len=32,
        learning_rate=LearningRate(kind="linear", peak=4e-3, final=1e-3, warmup_steps=0),
        rope_scaling=YarnScaling(factor=2.0, original_max_seq_len=16),
    )
    workload = base.workload.model_copy(
        update={
            "seq_len": 16,
            "global_batch_size": BATCH,
            "total_tokens": 16 * BATCH * FIRST,
            "learning_rate": rate,
            "later_phases": (long,),
        }
    )
    model = base.model.model_copy(update={"num_layers": 2, "vocab_size": 64})
    scenario = base.model_copy(update={"workload": workload, "model": model})
    return RunPlan(
        tool_version="x",
        scenario_hash=scenario.content_hash(),
        scenario=scenario,
        phases=tuple(
            PhasePlan(name=p.name, parallel=plan)
            for p, plan in zip(phases_of(scenario), PLANS, strict=True)
        ),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LaunchOptions]:
    folder = tmp_path_factory.mktemp("phases")
    (folder / "run.yaml").write_text(dump_yaml(run_plan()))
    text = folder / "text.txt"
    text.write_text("to be or not to be, that is the question. " * 500)
    options = LaunchOptions(text=text, tokenizer="characters", nproc=2, checkpoint_every=4)
    return folder, options


def steps(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]


def test_phases_go_on_where_the_last_one_ended(place: tuple[Path, LaunchOptions]) -> None:
    folder, options = place
    results = launch_phases(folder / "run.yaml", folder / "whole", options)
    assert [r.name for r in results] == ["pretrain", "long"]
    first, second = (steps(r.result.out_dir) for r in results)
    assert (len(first), len(second)) == (FIRST, SECOND)
    for phase, rows in zip(phases_of(run_plan().scenario), (first, second), strict=True):
        for i, row in enumerate(rows):
            assert row["learning_rate"] == learning_rate_at(i, phase.scenario.workload)
    # a model that began anew would know no more than that there are 64 ids
    assert first[0]["loss"] > 0.9 * math.log(64)
    assert second[0]["loss"] < 0.5 * (first[0]["loss"] + first[-1]["loss"])
    assert all(len(r.result.measurements) == 1 for r in results)


def test_a_run_that_ends_at_a_boundary_goes_on_to_the_same_bits(
    place: tuple[Path, LaunchOptions],
) -> None:
    folder, options = place

    def first_phase_alone(paths: Any, out: Any, own: Any, show: Any) -> Any:
        if Path(out).name.startswith("2-"):
            raise KeyboardInterrupt
        return launch(paths, out, own, show)

    with pytest.raises(KeyboardInterrupt):
        launch_phases(folder / "run.yaml", folder / "cut", options, None, first_phase_alone)
    assert not phase_folder(folder / "cut", 1, "long").exists()
    with pytest.raises(InputError, match="not an empty folder"):
        launch_phases(folder / "run.yaml", folder / "cut", options)
    again = replace(options, resume=True)
    results = launch_phases(folder / "run.yaml", folder / "cut", again)
    ends = [
        load_full(phase_folder(folder / name, 1, "long") / "checkpoint-long")[0]
        for name in ("whole", "cut")
    ]
    assert results[-1].result.measurements
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_steps_are_the_phases_own(place: tuple[Path, LaunchOptions]) -> None:
    folder, options = place
    with pytest.raises(InputError, match="--steps"):
        launch_phases(folder / "run.yaml", folder / "never", replace(options, steps=3))
    assert not (folder / "never").exists()
