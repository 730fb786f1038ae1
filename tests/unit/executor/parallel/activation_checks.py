"""One rank of test_activations_on_ranks.py: `activation_checks.py WORLD RANK FOLDER`.

Plans that drop, narrow or move saved tensors run one step over the ranks; the whole model in
this process with the same numbers and nothing moved is what they are compared with. What
was found goes to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flopwright.executor.measure.memory import saved_bytes
from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.activations import ActivationStore, policy_of
from flopwright.executor.parallel.experts import AllToAllDispatch
from flopwright.executor.parallel.groups import GroupRegistry, Groups
from flopwright.executor.parallel.pipeline import MicroBatch, Runner, StageParts
from flopwright.models.saving import Saver
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.plan.lower import lower
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.report.trace import TraceEvent
from flopwright.spec.model import MlaAttention, Mlp, ModelSpec, Moe

CPU, F64, SEQ, MICROBATCHES = torch.device("cpu"), torch.float64, 6, 6
KIMI = ("norm", "swiglu", "mla_up", "moe_down")
PLANS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "gpipe offload": {"schedule": "gpipe", "activation_offload": True},
        "gpipe offload fp8 kimi": {
            "schedule": "gpipe", "activation_offload": True, "fp8_activations": True,
            "recompute": "selective", "recompute_tags": KIMI,
        },
        "gpipe offload full": {
            "schedule": "gpipe", "activation_offload": True, "recompute": "full",
        },
        "1f1b fp8": {"fp8_activations": True},
    },
    2: {
        "1f1b full": {"pp": 2, "recompute": "full"},
        "1f1b first layers offload": {
            "pp": 2, "recompute": "full", "recompute_layers": 1, "activation_offload": True,
        },
        "interleaved offload selective": {
            "pp": 2, "vpp": 2, "schedule": "interleaved_1f1b", "recompute": "selective",
            "activation_offload": True,
        },
        "zb_h1 offload kimi fp8": {
            "pp": 2, "schedule": "zb_h1", "recompute": "selective", "recompute_tags": KIMI,
            "activation_offload": True, "fp8_activations": True,
        },
        "zb_v offload": {"pp": 2, "vpp": 2, "schedule": "zb_v", "activation_offload": True},
        "dualpipe_v full offload": {
            "pp": 2, "vpp": 2, "schedule": "dualpipe_v", "recompute": "full",
            "activation_offload": True,
        },
        "gpipe core mlp offload": {
            "pp": 2, "schedule": "gpipe", "recompute": "selective",
            "recompute_tags": ("core_attn", "mlp", "moe"), "activation_offload": True,
        },
        "ep2 none": {"dp_shard": 2, "ep": 2},
        "ep2 moe": {
            "dp_shard": 2, "ep": 2, "recompute": "selective", "recompute_tags": ("moe",),
        },
        "ep2 kimi": {
            "dp_shard": 2, "ep": 2, "recompute": "selective", "recompute_tags": KIMI,
        },
        "ep2 full": {"dp_shard": 2, "ep": 2, "recompute": "full"},
        "ep2 fp8 offload": {
            "dp_shard": 2, "ep": 2, "schedule": "gpipe", "fp8_activations": True,
            "activation_offload": True,
        },
    },
}  # fmt: skip


def small_model() -> ModelSpec:
    """Returns a model with latent attention and, from its second layer on, experts."""
    return ModelSpec(
        name="small",
        hidden_size=128,
        num_layers=4,
        vocab_size=13,
        attention=MlaAttention(
            num_heads=2,
            q_lora_rank=6,
            kv_lora_rank=5,
            qk_nope_head_dim=4,
            qk_rope_head_dim=2,
            v_head_dim=3,
        ),
        mlp=Mlp(intermediate_size=256),
        moe=Moe(
            num_experts=4,
            top_k=2,
            expert_intermediate_size=128,
            num_shared_experts=1,
            first_dense_layers=1,
            sequence_balance_loss=0.01,
        ),
    )


def chunk_module(
    spec: ModelSpec, plan: ParallelPlan, chunk: int, share: float, **experts: Any
) -> Stage:
    """Returns a chunk of the model with its first weights."""
    layers = list(plan.chunk_layers(spec.num_layers)[chunk])
    layers = [-1] * (chunk == 0) + layers + [spec.num_layers] * (chunk == plan.num_chunks - 1)
    stage = build_stage(spec, layers, dtype=F64, **experts)
    init_weights_(stage, spec, 0)
    for block in stage.moe_blocks().values():
        block.gate.balance_share = share
    return stage


def check(plan: ParallelPlan, registry: GroupRegistry) -> dict[str, Any]:
    """Returns what one step under a plan showed on this rank."""
    spec = small_model()
    torch.manual_seed(0)
    rows = torch.randint(spec.vocab_size, (plan.dp, MICROBATCHES, 1, SEQ + 1))
    all_batches = [
        [MicroBatch(tokens=r[:, :-1].clone(), targets=r[:, 1:].clone()) for r in mine]
        for mine in rows
    ]
    groups = registry.build(Mesh(plan))
    batch = all_batches[groups.coordinates["dp"]]
    expected_loss, expected, loads = _single(spec, plan, all_batches)
    timer = ActionTimer(dist.get_rank(), CPU)
    mine = chunks_of_stage(plan, groups.coordinates["pp"])
    experts = _experts(plan, groups, timer)
    share = 1 / MICROBATCHES
    chunks = {c: chunk_module(spec, plan, c, share, **experts) for c in mine}
    for chunk in chunks.values():  # derived tables stand before anything is counted
        if chunk.rotary is not None:
            chunk.rotary(SEQ, next(chunk.parameters()))
    runner, store = _runner(plan, chunks, spec, groups, timer)
    excluded = [t for c in chunks.values() for t in c.constants()]
    holder = nn.Module()
    holder.constants = nn.ParameterList([nn.Parameter(t, False) for t in excluded])
    with saved_bytes([*chunks.values(), holder]) as meter:
        store.watch = meter.keep
        timer.start_step()
        value = runner.run_step(batch)
        trace = timer.finish_step()
    found = {n: p.grad for c in chunks.values() for n, p in c.named_parameters()}
    return {
        "gradients": _largest(found, expected, plan, groups),
        "loss": _loss_difference(value, expected_loss, groups),
        "log_equal": runner.log == list(runner.actions),
        "loads_equal": _loads_equal(chunks, loads, plan, groups),
        "peak_bytes": meter.peak_bytes,
        "live_bytes": meter.live_bytes,
        "host_tensors": len(store.host_tensors()),
        "moves": Counter(a.kind.value for a in runner.actions if a.kind in _MOVES),
        "timed": _timed_again(trace.events),
        "exchanges": Counter(e.name for e in trace.events if e.cls == "ep_comm"),
    }


_MOVES = {ActionKind.RECOMPUTE, ActionKind.OFFLOAD, ActionKind.FETCH}


def _experts(plan: ParallelPlan, groups: Groups, timer: ActionTimer) -> dict[str, Any]:
    if plan.ep == 1:
        return {}
    dispatcher = AllToAllDispatch(groups.ep, timer)
    return {"dispatcher": dispatcher, "ep_rank": groups.ep.index, "ep_size": plan.ep}


def _runner(
    plan: ParallelPlan,
    chunks: dict[int, Stage],
    spec: ModelSpec,
    groups: Groups,
    timer: ActionTimer,
) -> tuple[Runner, ActivationStore]:
    store = ActivationStore(plan, chunks, timer, CPU)
    actions = lower(plan, MICROBATCHES)[groups.coordinates["pp"]]
    hooks: dict[ActionKind, Any] = {
        ActionKind.OPTIMIZER_STEP: _nothing,
        ActionKind.REDUCE_GRADIENTS: _nothing,
    }
    parts = StageParts(
        chunks=chunks,
        num_chunks=plan.num_chunks,
        loss_fn=loss,
        hidden_shape=(1, SEQ, spec.hidden_size),
        dtype=F64,
        device=CPU,
        hooks={**hooks, **store.hooks()},
        around=store,
    )
    return Runner(actions=actions, parts=parts, groups=groups, timer=timer), store


def _timed_again(events: Sequence[TraceEvent]) -> dict[str, int]:
    """Returns how many pieces of time each RECOMPUTE action got."""
    return Counter(e.name for e in events if e.cls == "recompute")


def _nothing(_: Action) -> None:
    """Serves the end of a step: gradients are compared as they are."""


def _single(
    spec: ModelSpec, plan: ParallelPlan, batches: Sequence[Sequence[MicroBatch]]
) -> tuple[float, dict[str, Tensor], dict[int, Tensor]]:
    """Runs the whole model in this process: the plan's FP8 storage, and nothing else of it."""
    model = chunk_module(spec, ParallelPlan(), 0, 1 / MICROBATCHES)
    total, policy = 0.0, policy_of(ParallelPlan(fp8_activations=plan.fp8_activations))
    again = policy_of(plan)
    for one in (b for rank in batches for b in rank):
        # What is made again from narrowed tensors has their error: that is the plan's meaning.
        saver = Saver(again if plan.fp8_activations else policy)
        with saver.forward() if plan.fp8_activations else nullcontext():
            value = loss(model(one.tokens), one.targets)
        (value / MICROBATCHES).backward()
        total += float(value.detach()) / MICROBATCHES
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    loads = {n: b.loads for n, b in model.moe_blocks().items() if b.loads is not None}
    return total / plan.dp, gradients, loads


def _largest(
    found: dict[str, Tensor | None],
    expected: dict[str, Tensor],
    plan: ParallelPlan,
    groups: Groups,
) -> float:
    worst = 0.0
    for name, gradient in found.items():
        assert gradient is not None
        whole, value = expected[name], gradient
        if ".experts." in name and plan.ep > 1:
            part = whole.shape[0] // plan.ep
            whole = whole[groups.ep.index * part :][:part]
        elif plan.dp > 1:
            value = groups.dp.sum_(gradient.clone())
        norm = torch.linalg.vector_norm
        worst = max(worst, float(norm(value - whole) / norm(whole)))
    return worst


def _loss_difference(value: Tensor | None, expected: float, groups: Groups) -> float:
    if value is None:
        return 0.0
    return abs(float(groups.dp.sum_(value.clone()) / groups.dp.size) - expected)


def _loads_equal(
    chunks: dict[int, Stage], expected: dict[int, Tensor], plan: ParallelPlan, groups: Groups
) -> bool:
    found = {n: b.loads for c in chunks.values() for n, b in c.moe_blocks().items()}
    sums = {n: groups.dp.sum_(v.clone()) for n, v in found.items() if v is not None}
    return all(torch.equal(v, expected[n]) for n, v in sums.items())


def main() -> None:
    """Runs every plan of the world's size."""
    world, rank, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        world_size=world,
        rank=rank,
        timeout=timedelta(seconds=120),
    )
    registry = GroupRegistry()
    found = {n: check(ParallelPlan(**p), registry) for n, p in PLANS[world].items()}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
