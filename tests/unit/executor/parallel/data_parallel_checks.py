"""One rank of the checks in test_data_parallel_ranks.py, started with WORLD RANK FOLDER.

Every case trains a small mixture-of-experts model for a few steps by its plan's lowered list,
through the plan's data-parallel library, and the same model in one process with plain torch.
FOLDER/rank-N.json gets the largest differences, and what the library says of its memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel.choose import clip_gradients, make_data_parallel
from flopwright.executor.parallel.data_parallel.interface import DataParallel, Trainable
from flopwright.executor.parallel.groups import GroupRegistry, Groups
from flopwright.executor.parallel.pipeline import MicroBatch, Runner, StageParts
from flopwright.executor.parallel.sharing import (
    Sharing,
    make_sharing,
    tp_partial_names,
    tp_whole_names,
)
from flopwright.executor.parallel.whole_tensors import joined_tensor
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.plan.lower import lower
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import ActionKind
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import Optimizer, Precision

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
SEQ, STEPS, MICROBATCHES, RATE = 6, 3, 2, 0.02
# A large eps makes an update proportional to its gradient: a wrong scale shows.
OPTIMIZER = Optimizer(eps=1e-3, weight_decay=0.1, gradient_clip=0.3)

HOST = {"optimizer_offload": True}
HOST2 = {**HOST, "gradient_offload": True}
HOST3 = {**HOST2, "parameter_offload": True}
FSDP2 = {"data_parallel": "fsdp2"}
NONE = {"data_parallel": "none"}
# Final weights of the first case of a format and ep, on this rank.
_TWINS: dict[tuple[str, int], dict[str, Tensor]] = {}
TP2 = {"tp": 2}
ZB_V = {"pp": 2, "vpp": 2, "schedule": "zb_v"}
DP2, DP4, EP2 = {"dp_shard": 2}, {"dp_shard": 4}, {"ep": 2}
FUSED = {"fused_loss": True}


def _zero(stage: int) -> dict[str, Any]:
    return {"zero_stage": stage}


# By world size and name: the plan and the numbers' format.
CASES: dict[int, dict[str, tuple[dict[str, Any], str]]] = {
    2: {
        "none": ({**DP2, **NONE}, "fp64"),
        "none bf16": ({**DP2, **NONE}, "bf16"),
        "none host": ({**DP2, **NONE, **HOST}, "fp64"),
        "none host bf16": ({**DP2, **NONE, **HOST}, "bf16"),
        "none cp": ({"cp": 2, **NONE}, "fp64"),
        "none ep": ({**DP2, **NONE, **EP2}, "fp64"),
        "none ep bf16": ({**DP2, **NONE, **EP2}, "bf16"),
        "fsdp2 zero1": ({**DP2, **FSDP2, **_zero(1)}, "fp64"),
        "fsdp2 zero1 bf16": ({**DP2, **FSDP2, **_zero(1)}, "bf16"),
        "fsdp2 zero1 ep": ({**DP2, **FSDP2, **_zero(1), **EP2}, "fp64"),
        "fsdp2 zero1 host": ({**DP2, **FSDP2, **_zero(1), **HOST}, "fp32"),
        "fsdp2 zero1 ep host bf16": ({**DP2, **FSDP2, **_zero(1), **HOST, **EP2}, "bf16"),
        "fsdp2 zero2": ({**DP2, **FSDP2, **_zero(2)}, "fp64"),
        "fsdp2 zero2 bf16": ({**DP2, **FSDP2, **_zero(2)}, "bf16"),
        "fsdp2 zero3": ({**DP2, **FSDP2, **_zero(3)}, "fp64"),
        "fsdp2 zero3 cp": ({"cp": 2, **FSDP2, **_zero(3)}, "fp64"),
        "fsdp2 zero3 bf16": ({**DP2, **FSDP2, **_zero(3)}, "bf16"),
        "fsdp2 zero3 ep": ({**DP2, **FSDP2, **_zero(3), **EP2}, "fp64"),
        "fsdp2 zero3 host": ({**DP2, **FSDP2, **_zero(3), **HOST3, **FUSED}, "fp64"),
        "deepspeed zero1": ({**DP2, **_zero(1)}, "fp32"),
        "deepspeed zero1 cp": ({"cp": 2, **_zero(1)}, "fp32"),
        "deepspeed zero1 ep": ({**DP2, **_zero(1), **EP2}, "fp32"),
        "deepspeed zero1 ep bf16": ({**DP2, **_zero(1), **EP2}, "bf16"),
        "deepspeed zero1 host": ({**DP2, **_zero(1), **HOST}, "fp32"),
        "deepspeed zero1 host bf16": ({**DP2, **_zero(1), **HOST}, "bf16"),
        "deepspeed zero2": ({**DP2, **_zero(2)}, "fp32"),
        "deepspeed zero2 bf16": ({**DP2, **_zero(2)}, "bf16"),
        "deepspeed zero2 ep": ({**DP2, **_zero(2), **EP2}, "fp32"),
        "deepspeed zero2 host": ({**DP2, **_zero(2), **HOST2}, "fp32"),
        "deepspeed zero2 ep host bf16": ({**DP2, **_zero(2), **HOST, **EP2}, "bf16"),
        "deepspeed zero3": ({**DP2, **_zero(3)}, "fp32"),
        "deepspeed zero3 bf16": ({**DP2, **_zero(3)}, "bf16"),
        "deepspeed zero3 cp": ({"cp": 2, **_zero(3), **FUSED}, "fp32"),
        "deepspeed zero3 host": ({**DP2, **_zero(3), **HOST3}, "fp32"),
        "deepspeed zero3 host bf16": ({**DP2, **_zero(3), **HOST2}, "bf16"),
    },
    4: {
        "none ep": ({**DP4, **NONE, **EP2}, "fp64"),
        "fsdp2 zero1 ep": ({**DP4, **FSDP2, **_zero(1), **EP2}, "fp64"),
        "fsdp2 zero1 pp ep": ({"pp": 2, **DP2, **FSDP2, **_zero(1), **EP2}, "fp64"),
        "none pp bf16": ({**ZB_V, **DP2, **NONE}, "bf16"),
        "fsdp2 zero1 pp bf16": ({**ZB_V, **DP2, **FSDP2, **_zero(1)}, "bf16"),
        "deepspeed zero1 pp bf16": ({**ZB_V, **DP2, **_zero(1)}, "bf16"),
        "fsdp2 zero3 ep": ({**DP4, **FSDP2, **_zero(3), **EP2}, "fp64"),
        "fsdp2 zero1 replicas": ({"dp_replicate": 2, **DP2, **FSDP2, **_zero(1)}, "fp64"),
        "fsdp2 zero3 replicas": ({"dp_replicate": 2, **DP2, **FSDP2, **_zero(3)}, "fp64"),
        "fsdp2 zero2 replicas ep": (
            {"dp_replicate": 2, **DP2, **FSDP2, **_zero(2), **EP2},
            "fp64",
        ),
        "deepspeed zero1 ep": ({**DP4, **_zero(1), **EP2}, "fp32"),
        "deepspeed zero1 pp ep": ({"pp": 2, **DP2, **_zero(1), **EP2}, "fp32"),
        "deepspeed zero2 ep": ({**DP4, **_zero(2), **EP2}, "fp32"),
        "deepspeed zero3": ({**DP4, **_zero(3)}, "fp32"),
        "none tp ep": ({**DP2, **TP2, **NONE, "ep": 4}, "fp64"),
        "fsdp2 zero1 tp": ({**DP2, **TP2, **FSDP2, **_zero(1)}, "fp64"),
        "fsdp2 zero3 tp ep": ({**DP2, **TP2, **FSDP2, **_zero(3), **EP2}, "fp64"),
        "fsdp2 zero3 tp whole": (
            {**DP2, **TP2, **FSDP2, **_zero(3), "ep": 4, "sequence_parallel": False},
            "fp64",
        ),
        "none tp whole": (
            {**DP2, **TP2, **NONE, "sequence_parallel": False},
            "fp64",
        ),
        "deepspeed zero1 tp whole": (
            {**DP2, **TP2, **_zero(1), **EP2, "sequence_parallel": False},
            "fp32",
        ),
        "deepspeed zero2 tp ep": ({**DP2, **TP2, **_zero(2), **EP2}, "fp32"),
        "deepspeed zero2 tp host": ({**DP2, **TP2, **_zero(2), **HOST2}, "fp32"),
    },
}


def model() -> ModelSpec:
    """Returns K2's blocks at a size whose rows no number of ranks divides evenly."""
    data = load_model("kimi_k2_mini").model_dump()
    data.update(hidden_size=22, num_layers=4, vocab_size=61, max_seq_len=16)
    data["attention"].update(
        num_heads=2, q_lora_rank=9, kv_lora_rank=7, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5,
    )  # fmt: skip
    data["mlp"].update(intermediate_size=26)
    data["moe"].update(num_experts=8, top_k=2, expert_intermediate_size=10)
    return ModelSpec.model_validate(data)


def precision(name: str) -> Precision:
    """Returns sums and states in fp32 or wider."""
    wide = "fp32" if name == "bf16" else name
    return Precision(
        compute=name,
        weights=name,
        gradients=wide,
        optimizer_state=wide,
        master_weights="fp32" if name == "bf16" else "none",
    )


def make_chunks(
    plan: ParallelPlan, spec: ModelSpec, groups: Groups, sharing: Sharing, dtype: torch.dtype
) -> dict[int, Stage]:
    """Returns this rank's chunks with their first weights."""
    chunks = {}
    for chunk in chunks_of_stage(plan, groups.coordinates["pp"]):
        stage = sharing.build_chunk(spec, chunk, dtype, CPU)
        init_weights_(stage, spec, 3)
        chunks[chunk] = stage
    return chunks


def batches(plan: ParallelPlan, step: int) -> Tensor:
    """Returns the tokens of a step: [dp * cp, micro-batches, 1, SEQ + 1]."""
    generator = torch.Generator().manual_seed(step)
    shape = (plan.dp * plan.cp, MICROBATCHES * plan.pp, 1, SEQ + 1)
    return torch.randint(0, 61, shape, generator=generator)


def micro(tokens: Tensor) -> MicroBatch:
    """Returns a micro-batch of tokens [1, SEQ + 1]."""
    return MicroBatch(tokens=tokens[:, :-1].contiguous(), targets=tokens[:, 1:].contiguous())


class Trained:
    """A plan trained over the ranks."""

    def __init__(self, plan: ParallelPlan, kind: str, registry: GroupRegistry) -> None:
        self.plan, self.spec = plan, model()
        self.groups = registry.build(Mesh(plan))
        timer = ActionTimer(dist.get_rank(), CPU)
        # Context-parallel ranks have sequences of their own here: only who sums is looked at.
        sharing = make_sharing(plan.model_copy(update={"cp": 1}), self.groups, timer)
        self.chunks = make_chunks(plan, self.spec, self.groups, sharing, DTYPES[kind])
        named = {n: p for c in self.chunks.values() for n, p in c.named_parameters()}
        self.trainable = Trainable(
            parameters=named,
            chunks=self.chunks,
            expert_names=frozenset(n for n in named if ".experts." in n and plan.ep * plan.tp > 1),
            tp_whole_names=tp_whole_names(self.chunks.values()),
            tp_partial_names=tp_partial_names(self.chunks.values()),
            expert_copies=1 if plan.sequence_parallel else plan.tp,
            groups=self.groups,
            optimizer=OPTIMIZER,
            precision=precision(kind),
            timer=timer,
        )
        self.data_parallel: DataParallel = make_data_parallel(plan, self.trainable)
        self.norms: list[float] = []
        self.runner = Runner(
            actions=lower(plan, MICROBATCHES * plan.pp)[self.groups.coordinates["pp"]],
            parts=StageParts(
                chunks=self.chunks,
                num_chunks=plan.num_chunks,
                loss_fn=lambda x, targets: sharing.tensor.loss(x, targets, self.spec.vocab_size),
                hidden_shape=sharing.hidden_shape(SEQ, self.spec.hidden_size),
                dtype=DTYPES[kind],
                device=CPU,
                hooks={
                    ActionKind.GATHER_WEIGHTS: lambda a: self.data_parallel.gather_weights(
                        a.chunk, a.microbatch, a.bucket
                    ),
                    ActionKind.REDUCE_GRADIENTS: lambda a: self.data_parallel.reduce_gradients(
                        a.chunk, a.microbatch, a.bucket
                    ),
                    ActionKind.OPTIMIZER_STEP: lambda _: self._update(),
                },
                fused_loss=plan.fused_loss,
            ),
            groups=self.groups,
            timer=timer,
        )

    def _update(self) -> None:
        clip = OPTIMIZER.gradient_clip
        norm = clip_gradients(self.data_parallel, clip, self.groups.world, self.trainable)
        self.norms.append(float(norm))
        self.data_parallel.step(RATE)

    def step(self, number: int) -> float:
        """Runs a step; returns the mean loss over all ranks."""
        mine = batches(self.plan, number)[self.groups.dp_cp.index]
        self.runner.timer.start_step()
        mean = self.runner.run_step([micro(t) for t in mine])
        self.runner.timer.finish_step()
        total = torch.zeros(1, dtype=torch.float64)
        if mean is not None:
            total += mean.double() / self.groups.dp_cp.size / self.plan.tp
        self.groups.world.sum_(total)
        return float(total)


class Alone:
    """The same training in one process: autograd, AdamW and clipping are torch's."""

    def __init__(self, plan: ParallelPlan, kind: str) -> None:
        self.plan, spec = plan, model()
        layers = range(-1, spec.num_layers + 1)
        self.stage = build_stage(spec, layers, dtype=DTYPES[kind])
        init_weights_(self.stage, spec, 3)
        wide = torch.float32 if kind == "bf16" else DTYPES[kind]
        self.masters = {
            n: nn.Parameter(p.detach().to(wide, copy=True))
            for n, p in self.stage.named_parameters()
        }
        decayed = [p for p in self.masters.values() if p.ndim >= 2]
        plain = [p for p in self.masters.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
            lr=RATE,
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            eps=OPTIMIZER.eps,
        )

    def step(self, number: int) -> tuple[float, float]:
        """Runs a step; returns the mean loss and the gradient's norm."""
        rows = batches(self.plan, number).flatten(0, 1)
        sums = {n: torch.zeros_like(p) for n, p in self.masters.items()}
        total = 0.0
        for row in rows:
            batch = micro(row)
            value = loss(self.stage(batch.tokens), batch.targets)
            total += value.item() / len(rows)
            self.stage.zero_grad()
            (value / (len(rows) // (self.plan.dp * self.plan.cp))).backward()
            for name, parameter in self.stage.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad
        for name, master in self.masters.items():
            master.grad = sums[name] / (self.plan.dp * self.plan.cp)
        assert OPTIMIZER.gradient_clip is not None
        norm = nn.utils.clip_grad_norm_(self.masters.values(), OPTIMIZER.gradient_clip)
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.stage.named_parameters():
                parameter.copy_(self.masters[name])
        return total, float(norm)


def expected_part(trained: Trained, name: str, whole: Tensor) -> Tensor:
    """Returns this rank's slice of a whole tensor."""
    if not trained.trainable.is_expert(name):
        return whole
    return whole.chunk(trained.plan.ep)[trained.groups.ep.index]


def distances(trained: Trained, alone: Alone) -> Iterator[tuple[str, float]]:
    """Yields each tensor's relative distance from the single process's."""
    weights = dict(alone.stage.named_parameters())
    params = {p.name: p for p in parameters(trained.spec)}
    for name, part in trained.data_parallel.full_parameters():
        tensor = joined_tensor(part, params[name], trained.groups)
        yield name, _apart(tensor, expected_part(trained, name, weights[name].detach()))


def moved(alone: Alone) -> float:
    """Returns how far training moved the median tensor, relative to its norm."""
    start = build_stage(model(), range(-1, model().num_layers + 1), dtype=torch.float64)
    init_weights_(start, model(), 3)
    weights = dict(alone.stage.named_parameters())
    return median(_apart(p.detach(), weights[n].detach()) for n, p in start.named_parameters())


def _apart(tensor: Tensor, expected: Tensor) -> float:
    assert tensor.shape == expected.shape
    distance = torch.linalg.vector_norm(tensor.double() - expected.double())
    return float(distance / torch.linalg.vector_norm(expected.double()))


def check(plan: ParallelPlan, kind: str, registry: GroupRegistry) -> dict[str, Any]:
    """Trains both and returns how far apart they are."""
    trained, alone = Trained(plan, kind, registry), Alone(plan, kind)
    first = max(d for _, d in distances(trained, alone))
    losses, norms = [], []
    for number in range(STEPS):
        mine, (theirs, norm) = trained.step(number), alone.step(number)
        losses.append(abs(mine / theirs - 1))
        norms.append(abs(trained.norms[-1] / norm - 1))
    worst = max(distances(trained, alone), key=lambda item: item[1])
    library = trained.data_parallel
    final = {n: t.clone() for n, t in library.full_parameters()}
    twin = _TWINS.setdefault((kind, plan.ep), final) if kind == "bf16" else None
    return {
        "kind": type(library).__name__,
        "format": kind,
        "moved": moved(alone),
        "twin": None if twin is None else max(_apart(final[n], twin[n]) for n in final),
        "first": first,
        "losses": max(losses),
        "norms": max(norms),
        "weights": worst[1],
        "worst": worst[0],
        "names": [n for n, _ in library.full_parameters()] == list(trained.trainable.parameters),
        "log_equal": list(trained.runner.actions) == trained.runner.log,
        "numel": sum(p.numel() for p in alone.stage.parameters()),
        "memory": {
            name: getattr(library, f"{name}_bytes")()
            for name in ("weight", "gradient", "optimizer", "host")
        },
        "state": sorted({k for s in library.optimizer_state().values() for k in s}),
    }


def main() -> None:
    """Runs the cases of the world's size."""
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
    wanted = sys.argv[4] if len(sys.argv) > 4 else ""
    found = {
        name: check(ParallelPlan(**plan), kind, registry)
        for name, (plan, kind) in CASES[world].items()
        if wanted in name
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
