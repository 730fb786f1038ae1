"""Plans over two real ranks against one plain training loop in this process.

The loop below knows nothing of ranks: it walks the global batch in micro-batches. AdamW's
eps is large, so that an update is nearly proportional to its gradient: a wrong scale
anywhere (micro-batches, data parallelism, experts, clipping) moves the weights and fails.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flopwright.executor.checkpoint.load import load_full
from flopwright.executor.data.batches import open_dataset
from flopwright.executor.launch.checks import LaunchOptions
from flopwright.executor.launch.local import RunResult, launch
from flopwright.models.transformer.module import build_stage, init_weights_, loss
from flopwright.plan.learning_rate import learning_rate_at
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.metrics import TIME_CLASSES
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file
from flopwright.spec.parameters import parameters
from flopwright.spec.scenario import Scenario

pytestmark = pytest.mark.slow

STEPS = 6
TEXT = "the quick brown fox jumps over the lazy dog and then it sleeps in the warm sun. " * 900
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "fp64": {
        "dp2": {"dp_shard": 2},
        "pp2": {"pp": 2},
        "pp2-gpipe": {"pp": 2, "schedule": "gpipe", "layers_per_stage": (1, 2)},
        "pp2-zb_h1": {"pp": 2, "schedule": "zb_h1"},
        "dp2-ep2": {"dp_shard": 2, "ep": 2},
    },
    "fp32": {
        "dp2-zero1": {"dp_shard": 2, "zero_stage": 1},
        "pp2": {"pp": 2},
        "dp2-ep2-zero1": {"dp_shard": 2, "ep": 2, "zero_stage": 1},
        "dp2-zero1-again": {"dp_shard": 2, "zero_stage": 1},
    },
    "fp32 on 4 ranks": {
        "pp2-dp2-zero1": {"pp": 2, "dp_shard": 2, "zero_stage": 1},
        "dp4-ep2-zero1": {"dp_shard": 4, "ep": 2, "zero_stage": 1},
        "pp2-dp2-ep2-zero1": {"pp": 2, "dp_shard": 2, "ep": 2, "zero_stage": 1},
        "hybrid": {"dp_replicate": 2, "dp_shard": 2, "ep": 2, "layers_per_stage": (3,)},
        "pp2-dp2": {"pp": 2, "dp_replicate": 2, "layers_per_stage": (2, 1)},
    },
}
TOLERANCE = {"fp64": 1e-9, "fp32": 1e-5}


def small(dtype: str, ranks: int) -> Scenario:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    node = scenario.cluster.node.model_copy(update={"gpus": ranks})
    model, workload = scenario.model, scenario.workload
    assert model.moe is not None
    moe = model.moe.model_copy(
        update={"num_experts": 4, "top_k": 2, "expert_intermediate_size": 24}
    )
    attention = model.attention.model_copy(
        update={"num_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8}
    )
    mlp = model.mlp.model_copy(update={"intermediate_size": 48})
    precision = workload.precision.model_copy(
        update=dict.fromkeys(("compute", "weights", "gradients", "optimizer_state"), dtype)
    )
    optimizer = workload.optimizer.model_copy(update={"eps": 0.1, "gradient_clip": 0.5})
    rate = workload.learning_rate.model_copy(update={"peak": 0.3, "final": 0.1, "warmup_steps": 2})
    return scenario.model_copy(
        update={
            "cluster": scenario.cluster.model_copy(update={"node": node}),
            "model": model.model_copy(
                update={
                    "hidden_size": 32,
                    "num_layers": 3,
                    "vocab_size": 64,
                    "attention": attention,
                    "mlp": mlp,
                    "moe": moe,
                }
            ),
            "workload": workload.model_copy(
                update={
                    "seq_len": 16,
                    "global_batch_size": 8,
                    "total_tokens": 8 * 16 * STEPS,
                    "precision": precision,
                    "optimizer": optimizer,
                    "learning_rate": rate,
                    "seed": 3,
                }
            ),
        }
    )


@dataclass(frozen=True)
class Run:
    dtype: str
    scenario: Scenario
    result: RunResult
    progress: list[dict[str, Any]]


@dataclass(frozen=True)
class Reference:
    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]
    held_out: float


@pytest.fixture(scope="module", params=list(PLANS))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    dtype, folder = request.param.split()[0], tmp_path_factory.mktemp("run")
    text = folder / "text.txt"
    text.write_text(TEXT)
    world = 4 if "4 ranks" in request.param else 2
    scenario, paths = small(dtype, world), []
    for name, plan in PLANS[request.param].items():
        path = folder / f"{name}.yaml"
        file = make_plan_file(scenario, ParallelPlan(micro_batch_size=2, **plan), name)
        path.write_text(dump_yaml(file))
        paths.append(path)
    events: list[dict[str, Any]] = []
    options = LaunchOptions(text=text, tokenizer="characters", steps_per_round=2, nproc=world)
    result = launch(paths, folder / "out", options, events.append)
    return Run(dtype, scenario, result, events)


@pytest.fixture(scope="module")
def reference(run: Run) -> Reference:
    dtype = {"fp64": torch.float64, "fp32": torch.float32}[run.dtype]
    spec, workload = run.scenario.model, run.scenario.workload
    data = open_dataset(run.result.out_dir / "data", workload)
    model = build_stage(spec, range(-1, spec.num_layers + 1), dtype=dtype)
    init_weights_(model, spec, workload.seed)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=0.1,
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = torch.from_numpy(data.batch(step))
        model.zero_grad()
        loads = {n: torch.zeros(4, dtype=torch.int64) for n in model.moe_blocks()}
        total = 0.0
        for rows in batch.split(2):
            value = loss(model(rows[:, :-1]), rows[:, 1:])
            (value * len(rows) / len(batch)).backward()
            total += float(value.detach()) * len(rows) / len(batch)
            for n, block in model.moe_blocks().items():
                assert block.last_loads is not None
                loads[n] += block.last_loads
        everything = torch.cat(
            [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        )
        norms.append(float(everything.norm()))
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(min(1.0, 0.5 / (norms[-1] + 1e-6)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(step, workload)
        optimizer.step()
        for n, block in model.moe_blocks().items():
            block.gate.update_bias_(loads[n])
        losses.append(total)
    model.eval()
    rows = torch.from_numpy(data.held_out_sequences(64))
    with torch.no_grad():
        held_out = float(loss(model(rows[:, :-1]), rows[:, 1:]))
    weights = {n: t.detach().clone() for n, t in model.state_dict().items()}
    return Reference(losses, norms, weights, held_out)


def test_losses_equal_the_plain_loop(run: Run, reference: Reference) -> None:
    assert reference.losses[-1] < reference.losses[0] - 0.3  # it learns: the steps are real
    for measurement in run.result.measurements:
        assert len(measurement.losses) == STEPS
        assert measurement.losses == pytest.approx(
            reference.losses, rel=0, abs=TOLERANCE[run.dtype]
        ), measurement.plan_name


def test_gradient_norms_equal_the_plain_loop(run: Run, reference: Reference) -> None:
    assert max(reference.norms) > 0.5  # clipping is at work
    lines = (run.result.out_dir / "steps.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for entry in run.result.request.entries:
        norms = [r["gradient_norm"] for r in rows if r["plan"] == entry.name]
        assert norms == pytest.approx(reference.norms, rel=10 * TOLERANCE[run.dtype]), entry.name


def test_final_weights_equal_the_plain_loop(run: Run, reference: Reference) -> None:
    names = {p.name for p in parameters(run.scenario.model)}
    start = build_stage(run.scenario.model, range(-1, 4))
    init_weights_(start, run.scenario.model, 3)
    for name, folder in run.result.checkpoints.items():
        weights, manifest = load_full(folder, run.scenario.model.content_hash())
        assert manifest.step == STEPS
        assert set(weights) == names == set(reference.weights)
        for tensor, value in weights.items():
            expected = reference.weights[tensor]
            difference = float((value - expected).abs().max())
            assert difference < TOLERANCE[run.dtype] * 10, (name, tensor)
        moved = weights["model.layers.2.mlp.experts.down_proj"]
        before = dict(start.named_parameters())["model.layers.2.mlp.experts.down_proj"]
        assert float((moved - before.detach()).abs().max()) > 1e-3


def test_held_out_losses_equal_the_plain_loop(run: Run, reference: Reference) -> None:
    for measurement in run.result.measurements:
        assert measurement.held_out_loss == pytest.approx(
            reference.held_out, abs=10 * TOLERANCE[run.dtype]
        ), measurement.plan_name


def test_times_by_class_sum_to_the_step(run: Run) -> None:
    for measurement in run.result.measurements:
        metrics = measurement.metrics
        assert set(metrics.time_s) <= set(TIME_CLASSES)
        assert sum(metrics.time_s.values()) == pytest.approx(metrics.step_time_s, rel=1e-9)
        assert metrics.time_s["forward"] > 0
        assert metrics.time_s["backward"] > 0
        plan = next(e.plan.parallel for e in run.result.request.entries
                    if e.name == measurement.plan_name)  # fmt: skip
        assert ("ep_comm" in metrics.time_s) == (plan.ep > 1)
        assert ("pp_comm" in metrics.time_s) == (plan.pp > 1)
        assert len(measurement.step_time_samples_s) == STEPS - measurement.discarded_steps
        assert measurement.discarded_steps == 2


def test_memory_is_what_the_plan_says(run: Run) -> None:
    """Weights, gradients and moments follow from the parameters alone."""
    width = 8 if run.dtype == "fp64" else 4
    spec = run.scenario.model
    tensors = [p for p in parameters(spec) if p.trainable]
    for entry, measurement in zip(
        run.result.request.entries, run.result.measurements, strict=True
    ):
        plan = entry.plan.parallel
        memory = measurement.metrics.memory_bytes
        assert len(memory) == plan.pp
        experts = sum(p.numel for p in tensors if p.role == "expert")
        local = sum(p.numel for p in tensors) - experts + experts // plan.ep
        gradients = sum(stage["gradients"] for stage in memory)
        assert gradients == width * local, entry.name
        ways = plan.dp if plan.zero_stage else 1
        dense, mine = local - experts // plan.ep, experts // plan.ep
        moments = dense / ways + mine / (ways / plan.ep if plan.zero_stage else 1)
        states = sum(stage["optimizer_state"] for stage in memory)
        assert states == pytest.approx(2 * width * moments, abs=400), entry.name  # padding
        assert all(stage["activations"] > 0 for stage in memory)


def test_equal_plans_give_the_noise_floor(run: Run) -> None:
    floors = {m.noise_floor for m in run.result.measurements}
    if len(run.result.measurements) != 4 or run.dtype == "fp64":
        assert floors == {None}
        return
    first, again = (
        m.metrics.step_time_s
        for m in run.result.measurements
        if m.plan_name.startswith("dp2-zero1")
    )
    assert floors == {max(first, again) / min(first, again) - 1}


def test_progress_names_every_plan(run: Run) -> None:
    steps = [e for e in run.progress if "plan" in e]
    assert {e["plan"] for e in steps} == {e.name for e in run.result.request.entries}
    assert steps[-1]["eta_s"] == 0
    assert steps[-1]["step"] == steps[-1]["steps"] == STEPS


def test_traces_show_every_action_of_the_list(run: Run) -> None:
    for entry in run.result.request.entries:
        data = json.loads((run.result.out_dir / f"trace-{entry.name}.json").read_text())
        names = {e["name"] for e in data["traceEvents"] if e["ph"] == "X"}
        plan = entry.plan.parallel
        backward = {"I(0,0)", "W(0,0)"} if plan.schedule == "zb_h1" else {"B(0,0)"}
        assert {"F(0,0)", "OPTIM", "clip_norm"} | backward <= names
        assert ("RECV_F(1,0)" in names) == (plan.pp == 2)
        assert ("REDUCE_GRAD" in names) == (plan.dp > 1)
        assert ("ep_dispatch" in names) == (plan.ep == 2)
        assert ("gather_weights" in names) == (plan.zero_stage == 1)


def test_the_trace_and_the_predicted_one_line_up(run: Run) -> None:
    """Action by action: what a rank computes, and apart from that what it receives."""
    of_list = re.compile(r"(F|B|I|W|RECV_F|RECV_B)\(\d+,\d+\)|REDUCE_GRAD|OPTIM")
    for entry in run.result.request.entries:
        data = json.loads((run.result.out_dir / f"trace-{entry.name}.json").read_text())
        real = sorted((e for e in data["traceEvents"] if e["ph"] == "X"), key=lambda e: e["ts"])
        plan = entry.plan.parallel
        _, predicted = predict(run.scenario, plan)
        for stage in range(plan.pp):
            ran = [e["name"] for e in real if e["pid"] == stage * plan.dp]
            foretold = [e.name for e in predicted if e.rank == stage]
            for receives in (False, True):
                ours, theirs = (
                    [
                        name
                        for name in dict.fromkeys(names)
                        if of_list.fullmatch(name) and name.startswith("RECV") == receives
                    ]
                    for names in (ran, foretold)
                )
                assert ours == theirs, (entry.name, stage)
                assert ours or receives
