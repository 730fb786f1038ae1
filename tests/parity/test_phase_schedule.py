"""Kimi K2's schedule in miniature, through four plans, its launcher killed at each boundary."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flopwright.errors import InputError
from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.checkpoint.manifest import find_checkpoint
from flopwright.executor.data.opening import open_data
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import launch
from flopwright.executor.launch.phases import launch_phases, phase_folder
from flopwright.models.transformer.module import build_stage
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.phases import Phase, PhasePlan, RunPlan, phases_of
from flopwright.report.metrics import Measurement
from flopwright.spec.load import dump_yaml, load_scenario
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="ranks die with their launcher on Linux"),
]
ROOT = Path(__file__).parents[2]
TEXT = ROOT / "scenarios" / "texts" / "own_sources.yaml"
PLANS = {
    "pretrain": ParallelPlan(dp_shard=2, ep=2, zero_stage=1, micro_batch_size=2),
    "anneal": ParallelPlan(pp=2, micro_batch_size=4),
    "long_context": ParallelPlan(
        dp_shard=2, zero_stage=3, data_parallel="fsdp2", micro_batch_size=2
    ),
    "yarn": ParallelPlan(cp=2),
}
# Between two phases, once with the ranks of the next one at work, and between two again.
KILLS = ("2-anneal:", "3-long_context:train", "4-yarn:")


@pytest.fixture(scope="module")
def scenario() -> Scenario:
    """Returns the shipped scenario with a thinner model."""
    base = load_scenario("kimi_k2_mini_all_phases_2cpu_fp32")
    assert base.model.moe is not None
    moe = base.model.moe.model_copy(update={"num_experts": 8})
    thin = {"num_layers": 2, "vocab_size": 256, "moe": moe}
    return base.model_copy(update={"model": base.model.model_copy(update=thin)})


@dataclass(frozen=True)
class Gone:
    """A run that has come to its end, and the exit codes of its launchers."""

    out: Path
    codes: tuple[int, ...]
    phases: tuple[Phase, ...]

    def folder(self, index: int) -> Path:
        return phase_folder(self.out, index, self.phases[index].name)

    def steps(self, index: int) -> list[dict[str, Any]]:
        lines = (self.folder(index) / "steps.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def model_at_end(self, index: int, spec: ModelSpec) -> torch.nn.Module:
        """Returns the weights that a phase ended with, in a model that may scale positions."""
        name = self.phases[index].name
        weights, _ = load_full(self.folder(index) / f"checkpoint-{name}")
        model = build_stage(spec, range(-1, spec.num_layers + 1), dtype=torch.float32)
        model.load_state_dict(weights)
        return model.eval()


@pytest.fixture(scope="module")
def gone(scenario: Scenario, tmp_path_factory: pytest.TempPathFactory) -> Gone:
    folder = tmp_path_factory.mktemp("schedule")
    phases = phases_of(scenario)
    plan = RunPlan(
        tool_version="x",
        scenario_hash=scenario.content_hash(),
        scenario=scenario,
        phases=tuple(PhasePlan(name=p.name, parallel=PLANS[p.name]) for p in phases),
    )
    (folder / "run.yaml").write_text(dump_yaml(plan))
    codes = []
    for at in (*KILLS, ":"):
        arguments = [str(folder / "run.yaml"), str(folder / "out"), str(TEXT), at]
        command = [sys.executable, str(Path(__file__).with_name("phase_kills.py")), *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        codes.append(done.returncode)
        assert done.returncode in {0, -9}, done.stderr[-3000:]
    return Gone(folder / "out", tuple(codes), phases)


def test_every_launcher_was_killed_and_the_run_came_to_its_end(gone: Gone) -> None:
    assert gone.codes == (-9, -9, -9, 0)
    for index, phase in enumerate(gone.phases):
        rows = gone.steps(index)
        assert [row["step"] for row in rows] == list(range(phase.scenario.workload.num_steps))


def test_rates_batches_and_mixtures_are_as_planned_at_every_step(gone: Gone) -> None:
    ends = []
    for index, phase in enumerate(gone.phases):
        workload, rows = phase.scenario.workload, gone.steps(index)
        batches = [lv.batch for lv in workload.batch_levels for _ in range(lv.steps)]
        own = workload.model_copy(update={"seed": workload.seed + index})
        data = open_data(TEXT, gone.folder(index) / "data", own)
        for i, row in enumerate(rows):
            assert row["learning_rate"] == learning_rate_at(i, workload)
            assert row.get("sequences", workload.global_batch_size) == batches[i]
            assert sum(row["sources"].values()) == batches[i]
            assert row["sources"] == data.sources(i)
        samples = sum(batches)
        share = sum(row["sources"]["executor"] for row in rows) / samples
        planned = {"base": 0.25, "anneal": 0.5}[str(workload.mixture)]
        assert abs(share - planned) < 5 * (planned * (1 - planned) / samples) ** 0.5
        ends.append((workload.learning_rate.peak, workload.learning_rate.final))
    # no rate jumps where a phase ends: the next one begins where its decay leads to
    assert [peak for peak, _ in ends[1:]] == [final for _, final in ends[:-1]]
    ramp = [row["sequences"] for row in gone.steps(0)]
    assert sorted(set(ramp)) == [8, 12, 16]
    assert ramp == sorted(ramp)


def test_every_phase_is_measured_apart_under_its_own_plan(gone: Gone) -> None:
    for index, phase in enumerate(gone.phases):
        path = gone.folder(index) / f"measurement-{phase.name}.json"
        found = Measurement.model_validate(json.loads(path.read_text()))
        assert found.plan["parallel"] == PLANS[phase.name].to_data()
        assert len(found.losses) == phase.scenario.workload.num_steps
        assert found.metrics.tokens_per_s * found.metrics.step_time_s == pytest.approx(
            phase.scenario.workload.tokens_per_step
        )


def test_the_loss_at_long_positions_falls_in_the_long_phases(gone: Gone) -> None:
    for index in (2, 3):
        scenario = gone.phases[index].scenario
        before = gone.phases[index - 1].scenario.workload.seq_len
        data = open_data(TEXT, gone.folder(index) / "data", scenario.workload)
        rows = torch.from_numpy(data.held_out_sequences(16))
        losses = [
            _by_position(gone.model_at_end(i, scenario.model), rows) for i in (index - 1, index)
        ]
        assert losses[1][before:].mean() < losses[0][before:].mean() - 0.01


@torch.no_grad()
def _by_position(model: torch.nn.Module, rows: Tensor) -> Tensor:
    """Returns the mean nats a token at each position [S]."""
    logits = model(rows[:, :-1])
    nats = torch.nn.functional.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
    return nats.mean(0)


def test_a_phase_behind_a_kill_ends_with_the_bits_of_one_that_nothing_came_before(
    gone: Gone, tmp_path: Path
) -> None:
    options = LaunchOptions(
        text=TEXT,
        tokenizer="characters",
        nproc=2,
        names=("anneal",),
        seed=1,
        start_from=find_checkpoint(gone.folder(0) / "checkpoint-pretrain"),
    )
    launch([gone.out / "2-anneal-plan.yaml"], tmp_path / "again", options)
    folders = (tmp_path / "again", gone.folder(1))
    again, killed = (load_full(folder / "checkpoint-anneal")[0] for folder in folders)
    assert again.keys() == killed.keys()
    assert all(torch.equal(again[name], killed[name]) for name in again)


def test_what_a_run_of_phases_cannot_be_asked_is_refused_before_it_starts(
    gone: Gone, tmp_path: Path
) -> None:
    options = LaunchOptions(text=TEXT, tokenizer="characters", nproc=2)
    plan = gone.out.parent / "run.yaml"
    with pytest.raises(InputError, match="not an empty folder"):
        launch_phases(plan, gone.out, options)
    with pytest.raises(InputError, match="--steps"):
        launch_phases(plan, tmp_path / "never", replace(options, steps=3))
    assert not (tmp_path / "never").exists()
