"""A run's JSONL lines, what goes to sinks, and the figures both are made of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flopwright.executor.launch.checks import LaunchOptions, check_request
from flopwright.executor.launch.machine import Machine
from flopwright.executor.measure.communication import travelled
from flopwright.executor.measure.kineto import kineto_trace
from flopwright.executor.measure.loads import Balance, balances
from flopwright.executor.measure.log import RunLog
from flopwright.executor.measure.rates import rates
from flopwright.executor.measure.sinks import open_sinks
from flopwright.executor.measure.timers import StepTrace
from flopwright.executor.train.collect import StepRow
from flopwright.plan.file import PlanFile
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.trace import TraceEvent
from flopwright.spec.load import load_scenario, make_plan_file

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan() -> PlanFile:
    return make_plan_file(load_scenario("kimi_k2_mini_2cpu_fp32"), ParallelPlan(dp_shard=2), "p")


def event(rank: int, name: str, cls: str, start: float, end: float, nbytes: int = 0) -> TraceEvent:
    return TraceEvent(rank, "comm", name, cls, start, end, nbytes)


def traces() -> tuple[StepTrace, ...]:
    """Rank 1 comes two seconds late to its all-reduce; both end together."""
    first = (
        event(0, "F(0,0)", "forward", 0.0, 1.0),
        event(0, "R(0)", "dp_comm", 1.0, 4.0, 100),
        event(0, "OFFLOAD(0,1)", "offload", 4.0, 4.5, 7),
    )
    second = (event(1, "F(0,0)", "forward", 0.0, 3.0), event(1, "R(0)", "dp_comm", 3.0, 4.0, 100))
    return (StepTrace(10.0, 5.0, first), StepTrace(10.0, 4.0, second))


def row(step: int, **more: Any) -> StepRow:
    return StepRow(
        step=step,
        loss=2.5,
        gradient_norm=1.5,
        learning_rate=0.1,
        step_time_s=5.0,
        timed=True,
        traces=traces(),
        **more,
    )


def test_waiting_for_the_last_partner_is_no_travelling(plan: PlanFile) -> None:
    found = travelled(traces(), Mesh(plan.parallel))
    assert set(found) == {"R", "OFFLOAD"}
    reduce = found["R"]
    assert (reduce.count, reduce.nbytes) == (1.0, 100.0)
    assert reduce.seconds == pytest.approx(1.0)  # of both ranks from 3 to 4
    assert reduce.waiting_s == pytest.approx(1.0)  # rank 0 two seconds, rank 1 none
    assert found["OFFLOAD"].rounded() == {
        "count": 0.5,
        "bytes": 4,
        "seconds": 0.25,
        "waiting_s": 0.0,
    }


def test_balances_are_the_loads_over_their_mean() -> None:
    loads = {4: torch.tensor([0, 6, 2, 0]), 7: torch.tensor([2, 2, 2, 2])}
    assert balances(loads) == {4: Balance(3.0, 0.0, 2), 7: Balance(1.0, 1.0, 0)}
    assert balances({}) == {}
    generator = np.random.default_rng(0)
    many = generator.integers(0, 50, (3, 64))
    found = balances({i: torch.from_numpy(many[i]) for i in range(3)})
    assert [b.max_over_mean for b in found.values()] == pytest.approx(
        list(many.max(1) / many.mean(1))
    )


def test_mfu_by_the_stated_convention(plan: PlanFile) -> None:
    workload, model = plan.scenario.workload, plan.scenario.model
    found = rates(plan.scenario, 2, 0.5)
    tokens = workload.seq_len * workload.global_batch_size
    assert found.tokens_per_s == pytest.approx(tokens / 0.5)
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens / 0.5 / 2)
    # Six products a token and active weight at least, and no more than twice that here.
    active = found.model_flops_per_s_per_gpu / found.tokens_per_s_per_gpu / 6
    assert 1e6 < active < 2 * 4.4e6, model.name
    peak = plan.scenario.cluster.node.gpu.peak_flops_per_s["fp32"]
    assert found.mfu == pytest.approx(found.model_flops_per_s_per_gpu / peak)


class Kept:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int, dict[str, float]]] = []
        self.closed = False

    def scalars(self, plan: str, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((plan, step, dict(values)))

    def close(self) -> None:
        self.closed = True


def write(out_dir: Path, plan: PlanFile, *sinks: Any) -> None:
    log = RunLog(out_dir, sinks)
    balance = {1: Balance(2.0, 0.5, 0), 3: Balance(4.0, 0.0, 2)}
    memory = {"weights": 10, "activations": 20}
    rows = [
        row(0, memory_bytes=memory, logits=(7.5, 3), balance=balance),
        row(1, balance=balance),
    ]
    log.turn("p", plan, 0, rows, 0.01)
    log.close()


def test_lines_and_figures_of_a_turn(tmp_path: Path, plan: PlanFile) -> None:
    sink = Kept()
    write(tmp_path, plan, sink)
    first, second = map(json.loads, (tmp_path / "steps.jsonl").read_text().splitlines())
    assert (first["plan"], first["step"], first["round"]) == ("p", 0, 0)
    assert first["peak_memory_bytes"] == 30
    assert (first["max_logit"], first["clipped_heads"]) == (7.5, 3)
    assert second["expert_max_over_mean"] == 4.0
    assert "memory_bytes" not in second
    assert "max_logit" not in second
    turn = json.loads((tmp_path / "rounds.jsonl").read_text())
    assert turn["median_step_s"] == 5.0
    assert turn["time_s"] == pytest.approx(
        {"forward": 1.0, "dp_comm": 3.0, "offload": 0.5, "idle": 0.5}
    )
    assert turn["travelled"]["R"]["bytes"] == 100
    assert turn["expert_loads"]["3"] == {"max_over_mean": 4.0, "min_over_mean": 0.0, "unused": 2}
    assert [(p, s) for p, s, _ in sink.rows] == [("p", 0), ("p", 1)]
    assert sink.rows[0][2]["memory_bytes/activations"] == 20.0
    assert sink.rows[1][2]["loss"] == 2.5
    assert sink.closed


def test_tensorboard_reads_what_was_written(tmp_path: Path, plan: PlanFile) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, plan, *open_sinks(["tensorboard"], tmp_path))
    events = EventAccumulator(str(tmp_path / "tensorboard" / "p"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 2.5), (1, 2.5)]
    assert events.Scalars("memory_bytes/weights")[0].value == 10


def test_mlflow_reads_what_was_written(tmp_path: Path, plan: PlanFile) -> None:
    mlflow = pytest.importorskip("mlflow")
    write(tmp_path, plan, *open_sinks(["mlflow"], tmp_path))
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name(tmp_path.name)
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "p"
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == [(0, 2.5), (1, 2.5)]


def test_wandb_writes_a_run_offline(
    tmp_path: Path, plan: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    write(tmp_path, plan, *open_sinks(["wandb"], tmp_path))
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))


def test_a_sink_without_its_package_is_refused(
    tmp_path: Path, plan: PlanFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    from flopwright.errors import InputError

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "wandb" else found(name)
    )
    file = tmp_path / "plan.yaml"
    file.write_text(json.dumps(plan.to_data()))
    machine = Machine(cores=2, gpus=0)
    with pytest.raises(InputError, match="pip install wandb"):
        check_request([file], None, LaunchOptions(log_to=("wandb",)), machine)
    assert check_request([file], None, LaunchOptions(kineto_trace=True), machine).kineto_trace


def test_a_kineto_trace_names_the_operators(tmp_path: Path) -> None:
    path = tmp_path / "kineto-p" / "rank-00000.json"
    with kineto_trace(path, CPU):
        torch.ones(4, 4) @ torch.ones(4, 4)
    names = {e.get("name") for e in json.loads(path.read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert list(path.parent.iterdir()) == [path]
