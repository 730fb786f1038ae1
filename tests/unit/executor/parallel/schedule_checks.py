"""One rank of the checks in test_schedules_on_ranks.py: `schedule_checks.py WORLD RANK FOLDER`.

Every schedule runs one step of a small model three ways: the whole model in this process,
our runner over the ranks, and the schedule of torch.distributed.pipelining that does the
same, over the same ranks. Losses and gradients go to FOLDER/rank-N.json as differences.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.parallel.pipeline import MicroBatch, Runner, StageParts
from flopwright.models.transformer.module import build_stage, init_weights_, loss
from flopwright.plan.lower import lower
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.spec.model import MlaAttention, Mlp, ModelSpec, Moe

CPU, F64, SEQ = torch.device("cpu"), torch.float64, 6
# name: (plan, torch's schedule of the same kind)
SCHEDULES: dict[str, tuple[dict[str, Any], Any]] = {
    "gpipe": ({}, ScheduleGPipe),
    "1f1b": ({}, Schedule1F1B),
    "interleaved_1f1b": ({"vpp": 2}, ScheduleInterleaved1F1B),
    "interleaved_1f1b_overlap": ({"vpp": 2}, None),
    "zb_h1": ({}, None),
    "zb_h1 interleaved": ({"vpp": 2}, ScheduleInterleavedZeroBubble),
    "zb_v": ({"vpp": 2}, ScheduleZBVZeroBubble),
    "dualpipe_v": ({"vpp": 2}, ScheduleDualPipeV),
}


def small_model(num_layers: int) -> ModelSpec:
    """Returns a model with latent attention and, from its second layer on, experts."""
    return ModelSpec(
        name="small",
        hidden_size=8,
        num_layers=num_layers,
        vocab_size=13,
        attention=MlaAttention(
            num_heads=2,
            q_lora_rank=6,
            kv_lora_rank=5,
            qk_nope_head_dim=4,
            qk_rope_head_dim=2,
            v_head_dim=3,
        ),
        mlp=Mlp(intermediate_size=12),
        moe=Moe(
            num_experts=4,
            top_k=2,
            expert_intermediate_size=5,
            num_shared_experts=1,
            first_dense_layers=1,
            sequence_balance_loss=0.01,
        ),
    )


def chunk_module(spec: ModelSpec, plan: ParallelPlan, chunk: int, share: float) -> nn.Module:
    """Returns a chunk of the model with its first weights."""
    layers = list(plan.chunk_layers(spec.num_layers)[chunk])
    layers = [-1] * (chunk == 0) + layers + [spec.num_layers] * (chunk == plan.num_chunks - 1)
    stage = build_stage(spec, layers, dtype=F64)
    init_weights_(stage, spec, 0)
    for block in stage.moe_blocks().values():
        block.gate.balance_share = share
    return stage


def check(name: str, registry: GroupRegistry) -> dict[str, Any]:
    """Returns how far one schedule is from the single process and from torch's."""
    changes, theirs = SCHEDULES[name]
    pp = dist.get_world_size()
    plan = ParallelPlan(pp=pp, schedule=name.split()[0], **changes)
    spec, microbatches = small_model(plan.num_chunks), 2 * pp
    torch.manual_seed(0)
    rows = torch.randint(spec.vocab_size, (microbatches, 1, SEQ + 1))
    batch = [MicroBatch(tokens=r[:, :-1], targets=r[:, 1:]) for r in rows]
    share = 1 / microbatches
    whole_loss, whole = _single(spec, batch, share)
    mine = chunks_of_stage(plan, dist.get_rank())
    chunks = {c: chunk_module(spec, plan, c, share) for c in mine}
    ours_loss, log_equal = _ours(plan, spec, chunks, batch, registry)
    ours = _gradients(chunks.values())
    out = {
        "log_equal": log_equal,
        "gradients": _largest(ours, whole),
        "loss": 0.0 if ours_loss is None else abs(float(ours_loss) - whole_loss),
        "has_loss": ours_loss is not None,
    }
    if theirs is not None:
        # Torch divides all gradients by the micro-batches, that of the balance loss too.
        copies = {c: chunk_module(spec, plan, c, 1.0) for c in mine}
        torch_loss = _theirs(theirs, plan, spec, copies, rows)
        out["torch_gradients"] = _largest(_gradients(copies.values()), ours)
        if ours_loss is not None:
            out["torch_loss"] = abs(torch_loss - float(ours_loss))
    return out


def _single(
    spec: ModelSpec, batch: Sequence[MicroBatch], share: float
) -> tuple[float, dict[str, Tensor]]:
    model = chunk_module(spec, ParallelPlan(), 0, share)
    total = 0.0
    for one in batch:
        value = loss(model(one.tokens), one.targets)
        (value / len(batch)).backward()
        total += float(value.detach()) / len(batch)
    return total, _gradients([model])


def _ours(
    plan: ParallelPlan,
    spec: ModelSpec,
    chunks: dict[int, nn.Module],
    batch: Sequence[MicroBatch],
    registry: GroupRegistry,
) -> tuple[Tensor | None, bool]:
    groups, timer = registry.build(Mesh(plan)), ActionTimer(dist.get_rank(), CPU)
    actions = lower(plan, len(batch))[dist.get_rank()]
    runner = Runner(
        actions=actions,
        parts=StageParts(
            chunks=chunks,
            num_chunks=plan.num_chunks,
            loss_fn=loss,
            hidden_shape=(1, SEQ, spec.hidden_size),
            dtype=F64,
            device=CPU,
            hooks={ActionKind.OPTIMIZER_STEP: lambda _: None},
        ),
        groups=groups,
        timer=timer,
    )
    timer.start_step()
    value = runner.run_step(batch)
    timer.finish_step()
    return value, runner.log == list(actions)


def _theirs(
    schedule: Any, plan: ParallelPlan, spec: ModelSpec, chunks: dict[int, nn.Module], rows: Tensor
) -> float:
    last = plan.num_chunks - 1
    hidden = torch.zeros(1, SEQ, spec.hidden_size, dtype=F64, requires_grad=True)
    logits = torch.zeros(1, SEQ, spec.vocab_size, dtype=F64, requires_grad=True)
    stages = [
        PipelineStage(
            module,
            chunk,
            plan.num_chunks,
            CPU,
            input_args=(rows[0, :, :-1] if chunk == 0 else hidden,),
            output_args=(logits if chunk == last else hidden,),
        )
        for chunk, module in chunks.items()
    ]
    single = schedule in {ScheduleGPipe, Schedule1F1B}
    runs = schedule(stages[0] if single else stages, len(rows), loss_fn=loss, scale_grads=True)
    tokens = rows.flatten(0, 1)
    losses: list[Tensor] = []
    first, final = 0 in chunks, last in chunks
    runs.step(
        *([tokens[:, :-1]] if first else []),
        **({"target": tokens[:, 1:], "losses": losses} if final else {}),
    )
    return float(torch.stack(losses).detach().mean()) if final else 0.0


def _gradients(modules: Any) -> dict[str, Tensor]:
    return {
        n: p.grad for module in modules for n, p in module.named_parameters() if p.grad is not None
    }


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found
    return max(
        float(torch.linalg.vector_norm(g - expected[n]) / torch.linalg.vector_norm(expected[n]))
        for n, g in found.items()
    )


def main() -> None:
    """Runs every schedule over the world's ranks."""
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
    found = {name: check(name, registry) for name in SCHEDULES}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
