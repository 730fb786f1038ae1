"""Head and loss in one: the same numbers, what it keeps and makes again, and what it saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode

from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.ops import Phase, ShardShape
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_scenario
from flopwright.spec.model import GqaAttention, Mlp, ModelSpec
from flopwright.spec.workload import Precision

BATCH, SEQ, HIDDEN, VOCAB = 2, 32, 48, 2300
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
SPEC = ModelSpec(
    name="small", hidden_size=HIDDEN, num_layers=1, vocab_size=VOCAB, max_seq_len=SEQ,
    attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=12),
    mlp=Mlp(intermediate_size=64),
)  # fmt: skip
TIED = SPEC.model_copy(update={"tied_embeddings": True})
SHAPE = {"micro_batch_size": BATCH, "seq_len": SEQ}


def _stage(spec: ModelSpec, dtype: str, layers: range = range(-1, 2)) -> Stage:
    stage = build_stage(spec, layers, dtype=DTYPES[dtype])
    init_weights_(stage, spec, 0)
    return stage.train()


def _batch() -> tuple[Tensor, Tensor]:
    rows = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _loss(stage: Stage, fused: bool) -> Tensor:
    tokens, targets = _batch()
    return stage(tokens, targets=targets) if fused else stage.loss(stage(tokens), targets)


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["own", "tied"])
@pytest.mark.parametrize(("dtype", "near"), [("fp64", 1e-12), ("fp32", 2e-6), ("bf16", 2e-2)])
def test_loss_and_gradients_are_those_of_the_two_ops(
    spec: ModelSpec, dtype: str, near: float
) -> None:
    found = []
    for fused in (False, True):
        stage = _stage(spec, dtype)
        value = _loss(stage, fused)
        value.backward()
        found.append({"loss": value.detach()} | {n: p.grad for n, p in stage.named_parameters()})
    for name, plain in found[0].items():
        error = (found[1][name] - plain).norm() / plain.norm()
        assert error <= near, (name, float(error))


def _head_rows(fused: Any, dtype: str = "fp32") -> Any:
    return layer_cost(SPEC, 1, ShardShape(**SHAPE, dtype=dtype, fused_loss=fused), np.size(fused))


def test_what_it_keeps(count_saved_bytes: Callable[..., tuple[int, Tensor]]) -> None:
    for fused in (False, True):
        stage, (_, targets) = _stage(SPEC, "fp32", range(1, 2)), _batch()
        x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)

        def run(stage: Stage = stage, x: Tensor = x, targets: Tensor = targets) -> Tensor:
            out: Tensor = stage(x, targets=targets)
            return out

        def apart(stage: Stage = stage, x: Tensor = x, targets: Tensor = targets) -> Tensor:
            return stage.loss(stage(x), targets)

        kept, _ = count_saved_bytes(stage, run if fused else apart)
        assert kept == _head_rows(fused).lives.bytes.sum()
    logits = BATCH * SEQ * VOCAB * 4
    saved = _head_rows(False).lives.bytes.sum() - _head_rows(True).lives.bytes.sum()
    assert saved == logits - BATCH * SEQ * 4  # a second number a token


def test_logits_are_made_once_more() -> None:
    product = 2 * BATCH * SEQ * HIDDEN * VOCAB
    for fused, forward, backward in ((False, 1, 2), (True, 1, 3)):
        ops = _head_rows(fused).ops
        assert ops.total_flops(Phase.FORWARD).item() == forward * product
        later = ops.total_flops(Phase.BACKWARD_INPUT) + ops.total_flops(Phase.BACKWARD_WEIGHT)
        assert later.item() == backward * product
    stage, (_, targets) = _stage(SPEC, "fp64", range(1, 2)), _batch()
    value = stage(torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64), targets=targets)
    with FlopCounterMode(display=False) as counted:
        value.backward()
    # torch's counter does not know the product that adds to its place (addmm_).
    assert counted.get_total_flops() == 2 * product


def test_plans_that_differ_in_it_are_priced_in_one_pass() -> None:
    both = _head_rows(np.array([0.0, 1.0, 0.0]))
    for column, fused in enumerate((False, True, False)):
        alone = _head_rows(fused)
        ops, times = both.ops, both.ops.count[:, column]
        assert (ops.flops[:, column] * times).sum() == alone.ops.flops.sum()
        assert (ops.read_bytes[:, column] * times).sum() == alone.ops.read_bytes.sum()
        assert both.lives.bytes[:, column].sum() == alone.lives.bytes.sum()


def _scenario() -> Any:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    precision = Precision(
        compute="fp32", weights="fp32", gradients="fp32", master_weights="none",
        optimizer_state="fp32",
    )  # fmt: skip
    changes = {"seq_len": SEQ, "global_batch_size": BATCH, "precision": precision}
    workload = scenario.workload.model_copy(update=changes)
    return scenario.model_copy(update={"model": SPEC, "workload": workload})


@pytest.mark.parametrize("fused", [False, True])
def test_the_fullest_moment_against_mem_tracker(fused: bool) -> None:
    stage = _stage(SPEC, "fp32")
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)
    assert stage.rotary is not None
    stage.rotary(SEQ, next(stage.parameters()))
    tracker = MemTracker()
    tracker.track_external(stage, *stage.constants())
    with tracker:
        value = _loss(stage, fused)
        after = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
        value.backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    plan = ParallelPlan(micro_batch_size=BATCH, fused_loss=fused)
    priced = evaluate(_scenario(), Candidates.from_plans([plan])).memory_bytes
    grown = _total(peak) - _total(after)
    assert priced["temporaries"][0, 0] == pytest.approx(grown, rel=0.01)


def _total(snapshot: dict[Any, int]) -> int:
    return next(v for k, v in snapshot.items() if getattr(k, "value", k) == "Total")


def test_a_plan_of_kimi_k2_saves_the_logits() -> None:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    plan = ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1, recompute="selective")
    plans = [plan, plan.model_copy(update={"fused_loss": True})]
    found = evaluate(scenario, Candidates.from_plans(plans))
    assert [str(p) for p in (Candidates.from_plans(plans).plan(1),)] == [str(plans[1])]
    last = sum(v[-1] for n, v in found.memory_bytes.items() if n != "reserved")
    logits = scenario.workload.seq_len * scenario.model.vocab_size * 2
    # Narrow logits, and what the loss widens them to: twice fp32.
    assert last[0] - last[1] > logits
    assert found.step_time_s[1] > found.step_time_s[0]  # the product once more
    assert found.step_time_s[1] < 1.15 * found.step_time_s[0]  # on the slowest stage
