"""One rank of the checks in test_parallel_ranks.py: `rank_checks.py WORLD RANK FOLDER`.

Every check compares what several ranks do together with the same arithmetic in one
process, and writes the largest difference to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel.choose import clip_gradients, make_data_parallel
from flopwright.executor.parallel.data_parallel.interface import Trainable
from flopwright.executor.parallel.experts import AllToAllDispatch
from flopwright.executor.parallel.groups import GroupRegistry, gather_bytes
from flopwright.executor.parallel.pipeline import MicroBatch, Runner, StageParts
from flopwright.models.moe.module import MixtureOfExperts
from flopwright.plan.lower import lower
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.spec.load import load_model
from flopwright.spec.workload import Optimizer, Precision

CPU = torch.device("cpu")
F64 = torch.float64
WIDTH, VOCAB, SEQ = 6, 11, 5

PLANS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "pipeline pp2 1f1b": {"pp": 2},
        "pipeline pp2 gpipe": {"pp": 2, "schedule": "gpipe"},
        "pipeline dp2": {"dp_shard": 2},
        "update plain": {"dp_shard": 2},
        "update plain experts": {"dp_shard": 2, "ep": 2},
        "update zero1": {"dp_shard": 2, "zero_stage": 1},
        "update zero1 experts": {"dp_shard": 2, "ep": 2, "zero_stage": 1},
        "update plain bf16": {"dp_shard": 2},
        "update zero1 bf16": {"dp_shard": 2, "zero_stage": 1},
        "update zero1 bf16 experts": {"dp_shard": 2, "ep": 2, "zero_stage": 1},
        "experts ep2": {"dp_shard": 2, "ep": 2},
    },
    4: {
        "pipeline pp4 1f1b": {"pp": 4},
        "pipeline pp4 gpipe": {"pp": 4, "schedule": "gpipe"},
        "pipeline pp2 dp2": {"pp": 2, "dp_shard": 2},
        "update plain pp2 dp2": {"pp": 2, "dp_shard": 2},
        "update zero1 pp2 dp2": {"pp": 2, "dp_shard": 2, "zero_stage": 1},
        "update plain dp4 ep2": {"dp_shard": 4, "ep": 2},
        "update zero1 dp4 ep2": {"dp_shard": 4, "ep": 2, "zero_stage": 1},
        "experts dp4 ep2": {"dp_shard": 4, "ep": 2},
        "experts ep4": {"dp_shard": 4, "ep": 4},
    },
}


def check_pipeline(plan: ParallelPlan, registry: GroupRegistry) -> dict[str, Any]:
    """Gradients of a chunked model over several micro-batches, and the executed log."""
    torch.manual_seed(0)
    chunks = [nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)).to(F64)]
    chunks += [nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(F64) for _ in range(3)]
    model = nn.Sequential(*chunks, nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, VOCAB)).to(F64))
    microbatches = 5
    tokens = torch.randint(0, VOCAB, (plan.dp, microbatches, 2, SEQ + 1))

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    groups = registry.build(Mesh(plan))
    index, dp_index = groups.coordinates["pp"], groups.coordinates["dp"]
    stage = nn.Sequential(*_contiguous(list(model), plan.pp)[index])

    def reduce() -> None:
        for p in stage.parameters():
            assert p.grad is not None
            groups.dp.sum_(p.grad).div_(plan.dp)

    actions = lower(plan, microbatches)[index]
    runner = Runner(
        actions=actions,
        parts=StageParts(
            chunks={index: stage},
            num_chunks=plan.pp,
            loss_fn=loss_fn,
            hidden_shape=(2, SEQ, WIDTH),
            dtype=F64,
            device=CPU,
            hooks={
                ActionKind.REDUCE_GRADIENTS: lambda _: reduce(),
                ActionKind.OPTIMIZER_STEP: lambda _: None,
            },
        ),
        groups=groups,
        timer=ActionTimer(dist.get_rank(), CPU),
    )
    runner.timer.start_step()
    loss = runner.run_step(
        [MicroBatch(tokens=t[:, :-1], targets=t[:, 1:]) for t in tokens[dp_index]]
    )
    runner.timer.finish_step()
    mine = [p.grad.clone() for p in stage.parameters() if p.grad is not None]
    model.zero_grad()
    everything = tokens.flatten(0, 2)
    expected_loss = loss_fn(model(everything[:, :-1]), everything[:, 1:])
    expected_loss.backward()
    expected = [p.grad for p in stage.parameters() if p.grad is not None]
    total = torch.zeros(1, dtype=F64) if loss is None else loss.reshape(1).clone() / plan.dp
    groups.world.sum_(total)
    return {
        "difference": _largest(mine, expected),
        "loss_difference": float((total - expected_loss.detach()).abs()),
        "log_equal": list(actions) == runner.log,
    }


def _contiguous(modules: list[nn.Module], parts: int) -> list[list[nn.Module]]:
    cuts = [round(i * len(modules) / parts) for i in range(parts + 1)]
    return [modules[a:b] for a, b in pairwise(cuts)]


def check_update(
    plan: ParallelPlan, registry: GroupRegistry, *, narrow: bool = False
) -> dict[str, Any]:
    """Three clipped AdamW updates on made-up gradients against torch's on their average.

    eps is large, so that an update is proportional to its gradient: a wrong scale shows.
    With `narrow` the weights are bf16 with fp32 masters; each gradient comes in two halves.
    """
    dtype = torch.bfloat16 if narrow else torch.float32 if plan.zero_stage else F64
    mesh = Mesh(plan)
    groups = registry.build(mesh)
    shapes = {"matrix": (5, 7), "vector": (5,), "experts": (4, 3, 5)}
    optimizer = Optimizer(eps=1.0, weight_decay=0.1, gradient_clip=0.3)
    start = {n: torch.randn(s, generator=_seeded(n, -1), dtype=F64) for n, s in shapes.items()}
    per_rank = shapes["experts"][0] // plan.ep

    def part(name: str, tensor: torch.Tensor, ep: int) -> torch.Tensor:
        return tensor[ep * per_rank : (ep + 1) * per_rank] if name == "experts" else tensor

    ep = groups.ep.index
    parameters = {n: nn.Parameter(part(n, t, ep).to(dtype).clone()) for n, t in start.items()}
    trainable = Trainable(
        parameters=parameters,
        expert_names=frozenset({"experts"} if plan.ep > 1 else ()),
        groups=groups,
        optimizer=optimizer,
        precision=Precision()
        if narrow
        else Precision(compute="fp32", weights="fp32", gradients="fp32", master_weights="none"),
        timer=ActionTimer(dist.get_rank(), CPU),
    )
    data_parallel = make_data_parallel(plan, trainable)
    kind = type(data_parallel).__name__
    reference = {n: nn.Parameter(t.clone()) for n, t in start.items()}
    update = torch.optim.AdamW(
        [
            {"params": [reference["matrix"], reference["experts"]], "weight_decay": 0.1},
            {"params": [reference["vector"]], "weight_decay": 0.0},
        ],
        lr=0.1,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
    )
    norms = []
    for step in range(3):
        gradients = {
            rank: {n: torch.randn(s, generator=_seeded(n, 100 * step + rank), dtype=F64)
                   for n, s in shapes.items()}
            for rank in range(plan.world_size)
        }  # fmt: skip
        mine = gradients[dist.get_rank()]
        for name, parameter in parameters.items():
            for _half in range(2):
                gradient = part(name, mine[name], ep).to(dtype) / 2
                (parameter * gradient).sum().backward()
        trainable.timer.start_step()
        data_parallel.reduce_gradients()
        norm = clip_gradients(data_parallel, optimizer.gradient_clip, groups.world, trainable)
        data_parallel.step(0.1)
        trainable.timer.finish_step()
        norms.append(float(norm) / _expected_norm(plan, mesh, gradients, part, shapes) - 1)
        pool = mesh.group_of("dp", dist.get_rank())
        for name, parameter in reference.items():
            parameter.grad = _average(plan, mesh, pool, name, gradients, part)
        total = _expected_norm(plan, mesh, gradients, part, shapes)
        for parameter in reference.values():
            assert parameter.grad is not None
            parameter.grad.mul_(min(1.0, 0.3 / (total + 1e-6)))
        update.step()
    final = [p.detach().to(F64) for p in parameters.values()]
    expected = [part(n, p.detach(), ep) for n, p in reference.items()]
    return {
        "difference": _largest(final, expected),
        "norm_difference": max(abs(n) for n in norms),
        "kind": kind,
        "gradients_left": any(p.grad is not None for p in parameters.values()),
        "optimizer_bytes": data_parallel.optimizer_bytes(),
    }


def _average(
    plan: ParallelPlan, mesh: Mesh, pool: Any, name: str, gradients: Any, part: Any
) -> torch.Tensor:
    """Returns the averaged gradient of the whole tensor over one stage's ranks, by definition."""
    if name != "experts" or plan.ep == 1:
        return torch.stack([gradients[r][name] for r in pool]).sum(0) / plan.dp
    slices = []
    for ep in range(plan.ep):
        holders = [r for r in pool if mesh.coordinates(r)["ep"] == ep]
        slices.append(sum(part(name, gradients[r][name], ep) for r in holders) / plan.dp)
    return torch.cat(slices)


def _expected_norm(
    plan: ParallelPlan, mesh: Mesh, gradients: Any, part: Any, shapes: Any
) -> float:
    squared = 0.0
    for pool in mesh.groups("dp"):
        for name in shapes:
            squared += float(_average(plan, mesh, pool, name, gradients, part).square().sum())
    return float(squared**0.5)


def check_experts(plan: ParallelPlan, registry: GroupRegistry) -> dict[str, Any]:
    """A MoE block over ranks against the same block with all experts and all tokens."""
    groups = registry.build(Mesh(plan))
    spec = load_model("kimi_k2_mini")
    size, index = groups.ep.size, groups.ep.index
    torch.manual_seed(0)
    whole = MixtureOfExperts(spec, None, 0, 1, dtype=F64, device=CPU)
    for p in whole.parameters():
        nn.init.normal_(p, std=0.2)
    for b in whole.buffers():
        b.zero_()
    timer = ActionTimer(dist.get_rank(), CPU)
    block = MixtureOfExperts(
        spec, AllToAllDispatch(groups.ep, timer), index, size, dtype=F64, device=CPU
    )
    local = whole.spec.num_experts // size
    state = {
        n: t[index * local : (index + 1) * local] if n.startswith("experts.") else t
        for n, t in whole.state_dict().items()
    }
    block.load_state_dict(state)
    # Unequal token counts: the ranks of a group need not see equally many.
    inputs = [torch.randn(1, 7 + 3 * r, spec.hidden_size, dtype=F64) for r in range(size)]
    outer = [torch.randn_like(x) for x in inputs]
    x = inputs[index].clone().requires_grad_()
    timer.start_step()
    out = block(x)
    out.backward(outer[index])
    traced = {e.name for e in timer.finish_step().events}
    together = torch.cat(inputs, dim=1).requires_grad_()
    expected = whole(together)
    expected.backward(torch.cat(outer, dim=1))
    begin = sum(t.shape[1] for t in inputs[:index])
    window = slice(begin, begin + inputs[index].shape[1])
    assert together.grad is not None
    assert x.grad is not None
    pairs = [(out, expected[:, window]), (x.grad, together.grad[:, window])]
    for name in ("gate_up_proj", "down_proj"):
        full = getattr(whole.experts, name).grad[index * local : (index + 1) * local]
        pairs.append((getattr(block.experts, name).grad, full))
    return {
        "difference": _largest([a for a, _ in pairs], [b for _, b in pairs]),
        "traced": sorted(traced),
    }


def _seeded(name: str, number: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash_of(name) * 10_007 + number + 1)


def hash_of(name: str) -> int:
    """Returns a number for a name that is the same in every process."""
    return sum(ord(c) * 31**i for i, c in enumerate(name)) % 100_003


def _largest(a: Any, b: Any) -> float:
    return max(float((x.detach() - y.detach()).abs().max()) for x, y in zip(a, b, strict=True))


def main() -> None:
    """Runs every check of the world's size."""
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
    checks: dict[str, Any] = {
        "pipeline": check_pipeline,
        "update": check_update,
        "experts": check_experts,
    }
    found = {
        name: checks[name.split()[0]](
            ParallelPlan(**plan), registry, **({"narrow": True} if "bf16" in name else {})
        )
        for name, plan in PLANS[world].items()
    }
    world_group = registry.build(Mesh(ParallelPlan(dp_shard=world))).world
    texts = gather_bytes(f"rank {rank}".encode() * rank, world_group, CPU)
    found["gather"] = {"equal": texts == [f"rank {r}".encode() * r for r in range(world)]}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
