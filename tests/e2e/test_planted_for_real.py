"""What is slow or large on purpose in real runs on this machine is what `compare` names first."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flopwright.executor.launch.commands import rank_environment, torchrun_command
from flopwright.executor.launch.request import (
    REQUEST_FILE,
    RunEntry,
    RunRequest,
    measurement_file,
    write_json,
)
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.findings import Finding
from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.fit_runs import fit_runs
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import predict_measurement, prior_of
from flopwright.simulator.comparison.run import compared
from flopwright.spec.load import load_scenario, make_plan_file

WORKER = Path(__file__).with_name("planted_worker.py")
HEALTHY = ("healthy", "healthy-again")
PLANTED = ("slow-rank", "slow-backward", "slow-traffic", "large-activations")


def launched(folder: Path) -> dict[str, Measurement]:
    """Returns the measurements of one launch: a plan as it is, twice, and with each fault."""
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload.model_copy(
        update={"seq_len": 32, "global_batch_size": 16, "total_tokens": 32 * 16 * 40}
    )
    scenario = scenario.model_copy(update={"workload": workload})
    plan = ParallelPlan(dp_shard=2, micro_batch_size=4)
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 2000)
    request = RunRequest(
        entries=tuple(
            RunEntry(name=n, plan=make_plan_file(scenario, plan, n)) for n in HEALTHY + PLANTED
        ),
        device="cpu", steps=12, steps_per_round=1, text=str(folder / "text.txt"),
        tokenizer="characters", held_out_sequences=2, checkpoints=False,
    )  # fmt: skip
    write_json(folder / REQUEST_FILE, request.to_data())
    command = torchrun_command(folder / REQUEST_FILE, nproc_per_node=2, log_dir=folder / "logs")
    where = command.index("-m", 3)
    done = subprocess.run(
        [*command[:where], str(WORKER), command[-1]], capture_output=True, text=True,
        timeout=300, check=False, env=rank_environment(os.environ, "cpu"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = [
        Measurement.model_validate_json((folder / measurement_file(e.name)).read_bytes())
        for e in request.entries
    ]
    # Faults were planted in the same plan, so that what twins differ by here is not noise. The
    # faults are far beyond it: the largest effect is named first, whatever else stands out.
    return {m.plan_name: m.model_copy(update={"noise_floor": None}) for m in found}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Measurement]:
    pytest.importorskip("deepspeed")
    return launched(tmp_path_factory.mktemp("planted"))


@pytest.fixture(scope="module")
def learnt(runs: dict[str, Measurement]) -> Calibration:
    healthy = [runs[n] for n in HEALTHY]
    return fit_runs(prior_of(healthy[0]), healthy, predict_measurement)


def first(learnt: Calibration, run: Measurement) -> Finding:
    found = compared(learnt, run)
    assert found.worst is not None
    return found.worst


@pytest.mark.slow
@pytest.mark.parametrize(
    ("planted", "kind", "name"),
    [
        ("slow-rank", "rank", "rank 1"),
        ("slow-backward", "time", "backward"),
        ("slow-traffic", "link", "dp_comm"),
        ("large-activations", "memory", "activations"),
    ],
)
def test_what_was_planted_is_named_first(
    runs: dict[str, Measurement], learnt: Calibration, planted: str, kind: str, name: str
) -> None:
    worst = first(learnt, runs[planted])
    assert (worst.kind, worst.name) == (kind, name), worst.text
    assert worst.measured > 1.5 * worst.predicted
