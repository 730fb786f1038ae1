"""One rank of the checks in test_muon_ranks.py: `muon_rank_checks.py WORLD RANK FOLDER`.

Several steps of the executor's optimizer on made-up gradients, against torch.optim.Muon on
each whole matrix and torch's AdamW on the rest; differences go to FOLDER/rank-N.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from muonclip_checks import check_muonclip
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel.choose import make_data_parallel
from flopwright.executor.parallel.data_parallel.interface import Trainable
from flopwright.executor.parallel.data_parallel.muon_cuts import local
from flopwright.executor.parallel.groups import GroupRegistry, Groups
from flopwright.executor.parallel.optimizers import make_optimizer, parameter_groups
from flopwright.models.optim.muon.layout import MatrixLayout
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.workload import Optimizer, Precision

STEPS, LR = 4, 0.05
SHAPES: Final = {
    "wide": (6, 16),
    "tall": (20, 4),
    "odd": (5, 7),
    "gate_up": (4, 2 * 6, 5),
    "down": (4, 5, 6),
    "vector": (6,),
    "table": (9, 6),
}
MATRICES: Final = ("wide", "tall", "odd", "gate_up", "down")
EXPERTS: Final = ("gate_up", "down")
PARTS: Final = {"gate_up": 2}
DIM: Final = {"wide": 0, "tall": 1, "gate_up": 0, "down": 1}  # what tp or etp cuts
SCALED: Final = "tall"  # its rows are scaled after each update, as QK-Clip does
OPTIMIZER: Final = Optimizer(kind="muon", weight_decay=0.1, momentum=0.9, eps=1e-3)
WIDTHS: Final = {
    "fp64": (torch.float64, {"weights": "fp64", "gradients": "fp64", "optimizer_state": "fp64"}),
    "fp32": (torch.float32, {"weights": "fp32"}),
    "bf16": (torch.bfloat16, {"weights": "bf16"}),
}

PLANS: Final[dict[int, dict[str, dict[str, Any]]]] = {
    1: {"none fp64": {}, "none fp32": {}, "none bf16": {}, "muonclip": {}},
    2: {
        "none fp64": {"dp_shard": 2},
        "none fp64 ep2": {"dp_shard": 2, "ep": 2},
        "zero1 fp32": {"dp_shard": 2, "zero_stage": 1},
        "zero1 fp32 ep2": {"dp_shard": 2, "ep": 2, "zero_stage": 1},
        "zero1 bf16": {"dp_shard": 2, "zero_stage": 1},
        "zero2 fp32": {"dp_shard": 2, "zero_stage": 2},
        "dtensor fp64": {"dp_shard": 2},
        "none fp64 tp2": {"tp": 2},
        "none fp64 tp2 etp2": {"tp": 2, "etp": 2},
        "muonclip dp2": {"dp_shard": 2},
        "muonclip ep2": {"dp_shard": 2, "ep": 2},
        "muonclip pp2": {"pp": 2},
        "muonclip fsdp2 zero1": {"dp_shard": 2, "zero_stage": 1, "data_parallel": "fsdp2"},
        "muonclip fsdp2 zero2": {"dp_shard": 2, "zero_stage": 2, "data_parallel": "fsdp2"},
        "muonclip fsdp2 zero3 ep2": {
            "dp_shard": 2,
            "ep": 2,
            "zero_stage": 3,
            "data_parallel": "fsdp2",
        },
        "muonclip fp32 zero1 ep2": {"dp_shard": 2, "ep": 2, "zero_stage": 1},
        "muonclip fp32 zero2": {"dp_shard": 2, "zero_stage": 2},
        "muonclip fp32 zero3": {"dp_shard": 2, "zero_stage": 3},
        "muonclip fp32 host": {"dp_shard": 2, "zero_stage": 1, "optimizer_offload": True},
        "muonclip tp2": {"tp": 2},
        "muonclip tp2 etp2": {"tp": 2, "etp": 2},
        "muonclip cp2 ring": {"cp": 2},
        "muonclip cp2 ulysses": {"cp": 2, "context_parallel": "ulysses"},
    },
    4: {
        "none fp64 ep2": {"dp_shard": 4, "ep": 2},
        "zero1 fp32": {"dp_shard": 4, "zero_stage": 1},
        "zero1 fp32 ep2": {"dp_shard": 4, "ep": 2, "zero_stage": 1},
        "zero1 fp32 tp2": {"dp_shard": 2, "tp": 2, "etp": 2, "zero_stage": 1},
        "dtensor fp64": {"dp_shard": 4},
        "dtensor fp64 tp2": {"dp_shard": 2, "tp": 2, "etp": 2},
        "dtensor fp64 hsdp": {"dp_replicate": 2, "dp_shard": 2},
        "none fp64 tp4": {"tp": 4, "dp_shard": 1},
        "muonclip pp2 dp2 ep2": {"pp": 2, "dp_shard": 2, "ep": 2},
        "muonclip fsdp2 zero3 tp2": {
            "tp": 2,
            "dp_shard": 2,
            "zero_stage": 3,
            "data_parallel": "fsdp2",
        },
    },
}


def seeded(name: str, number: int) -> Tensor:
    """Returns the same normal numbers on every rank."""
    seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % 100_003 * 1009 + number + 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPES[name], generator=generator, dtype=torch.float64)


def pieces(name: str, whole: Tensor) -> list[Tensor]:
    """Returns the matrices of a whole tensor, views."""
    parts = PARTS.get(name, 1)
    stack = whole.reshape(-1, *whole.shape[-2:])
    return [m for one in stack.unbind(0) for m in one.chunk(parts, 0)]


class Slicer:
    """What a plan leaves of a whole tensor on this rank, before ZeRO."""

    def __init__(self, plan: ParallelPlan, groups: Groups) -> None:
        self.plan, self.groups = plan, groups

    def layouts(self) -> dict[str, MatrixLayout]:
        """Returns the layouts of the matrices under the plan."""
        out = {}
        for name in MATRICES:
            axis: Any = ""
            if name in DIM:
                own, ways = ("etp", self.plan.etp) if name in EXPERTS else ("tp", self.plan.tp)
                axis = own if ways > 1 and self._divides(name, ways) else ""
            out[name] = MatrixLayout(parts=PARTS.get(name, 1), axis=axis, dim=DIM.get(name, 0))
        return out

    def __call__(self, name: str, whole: Tensor) -> Tensor:
        """Returns this rank's part of a whole tensor."""
        if name in EXPERTS:
            whole = whole.chunk(self.plan.ep, 0)[self.groups.ep.index]
        layout = self.layouts().get(name)
        if layout is None or not layout.axis:
            return whole
        group = getattr(self.groups, layout.axis)
        cut = [
            part.chunk(group.size, layout.dim - 2)[group.index]
            for part in whole.chunk(layout.parts, -2)
        ]
        return torch.cat(cut, -2)

    @staticmethod
    def _divides(name: str, ways: int) -> bool:
        rows = SHAPES[name][-2] // PARTS.get(name, 1)
        return (rows, SHAPES[name][-1])[DIM[name]] % ways == 0


class Reference:
    """The whole tensors, updated by torch's own optimizers."""

    def __init__(self, start: dict[str, Tensor], clone: Any) -> None:
        self.clone = clone
        self.whole = start
        self.parameters = {
            name: [nn.Parameter(m.clone()) for m in pieces(name, whole)]
            for name, whole in start.items()
            if name in MATRICES
        }
        self.rest = {n: nn.Parameter(w.clone()) for n, w in start.items() if n not in MATRICES}
        self.muon = torch.optim.Muon(
            [m for ms in self.parameters.values() for m in ms],
            lr=LR,
            weight_decay=OPTIMIZER.weight_decay,
            momentum=OPTIMIZER.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = torch.optim.AdamW(
            [
                {"params": [self.rest["table"]], "weight_decay": OPTIMIZER.weight_decay},
                {"params": [self.rest["vector"]], "weight_decay": 0.0},
            ],
            lr=LR,
            betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
            eps=OPTIMIZER.eps,
        )

    @torch.no_grad()
    def step(self, gradients: dict[str, Tensor], factor: Tensor) -> None:
        """Makes one update."""
        for name, parameter in self.rest.items():
            parameter.grad = gradients[name].clone()
        for name, matrices in self.parameters.items():
            for matrix, gradient in zip(matrices, pieces(name, gradients[name]), strict=True):
                matrix.grad = gradient.clone()
        with self.clone():
            self.muon.step()
        self.adamw.step()
        self.parameters[SCALED][0].mul_(factor.unsqueeze(1))

    def tensor(self, name: str) -> Tensor:
        """Returns the whole tensor as it is now."""
        if name in self.rest:
            return self.rest[name].detach()
        return torch.cat([m.detach() for m in self.parameters[name]]).view(SHAPES[name])


@contextmanager
def torchs_iteration_in_the_weights_dtype() -> Iterator[None]:
    """torch.optim.Muon casts to bf16 whatever it is given; here the cast only copies."""
    cast = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.clone()  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = cast  # type: ignore[method-assign]


@contextmanager
def unchanged() -> Iterator[None]:
    """torch.optim.Muon as it is."""
    yield


def check(name: str, fields: dict[str, Any], registry: GroupRegistry) -> dict[str, Any]:
    """Returns the largest difference over all tensors after STEPS updates, and state bytes."""
    backend, width = name.split()[:2]
    plan = ParallelPlan(**fields)
    groups = registry.build(Mesh(plan))
    dtype, formats = WIDTHS[width]
    narrow = width == "bf16"
    wide = torch.float32 if narrow else dtype
    slicer = Slicer(plan, groups)
    start = {n: seeded(n, 0).to(dtype).to(wide) for n in SHAPES}
    parameters = {n: nn.Parameter(slicer(n, w).to(dtype).contiguous()) for n, w in start.items()}
    if backend == "dtensor":
        parameters = {n: _sharded(p, plan, groups) for n, p in parameters.items()}
    precision = Precision(
        compute=formats["weights"], master_weights="fp32" if narrow else "none", **formats
    )
    factor = torch.linspace(0.5, 1.0, SHAPES[SCALED][0], dtype=wide)
    cut = slicer.layouts()[SCALED]
    assert cut.axis == "" or cut.dim == 1, "its rows stay whole"
    trainable = Trainable(
        parameters=parameters,
        expert_names=frozenset(EXPERTS if plan.ep > 1 else ()),
        groups=groups,
        optimizer=OPTIMIZER,
        precision=precision,
        timer=ActionTimer(dist.get_rank(), torch.device("cpu")),
        matrices=slicer.layouts(),
        row_factors={SCALED: factor},
    )
    trainable.timer.start_step()
    clone = unchanged if narrow else torchs_iteration_in_the_weights_dtype
    reference = Reference(start, clone)
    run = _dtensor_steps if backend == "dtensor" else _library_steps
    state = run(plan, trainable, slicer, reference, factor, dtype)
    mine = {n: _whole(p) for n, p in parameters.items()}
    wrong = {
        n: float((mine[n].double() - slicer(n, reference.tensor(n)).double()).norm())
        / float(slicer(n, reference.tensor(n)).double().norm())
        for n in SHAPES
    }
    return {"difference": max(wrong.values()), "worst": max(wrong, key=wrong.__getitem__), **state}


def _library_steps(
    plan: ParallelPlan,
    trainable: Trainable,
    slicer: Slicer,
    reference: Reference,
    factor: Tensor,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Steps through a data-parallel backend, which also averages the gradients."""
    data_parallel = make_data_parallel(plan, trainable)
    for step in range(1, STEPS + 1):
        gradients = {n: seeded(n, step).to(dtype) for n in SHAPES}
        for n, parameter in trainable.parameters.items():
            # An expert's gradient sums over the tokens of its group: ep times a rank's own.
            ways = plan.ep if n in EXPERTS else 1
            (parameter * slicer(n, gradients[n]) * ways).sum().backward()
        data_parallel.reduce_gradients()
        data_parallel.finish_gradients()
        data_parallel.step(LR)
        reference.step({n: g.to(factor.dtype) for n, g in gradients.items()}, factor)
    return {
        "kind": type(data_parallel).__name__,
        "optimizer_bytes": data_parallel.optimizer_bytes(),
    }


def _dtensor_steps(
    _plan: ParallelPlan,
    trainable: Trainable,
    slicer: Slicer,
    reference: Reference,
    factor: Tensor,
    _dtype: torch.dtype,
) -> dict[str, Any]:
    """Steps on sharded parameters as fully_shard leaves them."""
    optimizer = make_optimizer(parameter_groups(trainable), trainable)
    for group in optimizer.param_groups:
        group["lr"] = LR
    for step in range(1, STEPS + 1):
        gradients = {n: seeded(n, step) for n in SHAPES}
        for n, p in trainable.parameters.items():
            whole = slicer(n, gradients[n]).contiguous()
            p.grad = distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        optimizer.step()
        reference.step(gradients, factor)
    buffers = [t for s in optimizer.state.values() for t in s.values() if t.ndim]
    return {
        "kind": "dtensor",
        "optimizer_bytes": sum(local(b).numel() * b.element_size() for b in buffers),
    }


def _sharded(parameter: nn.Parameter, plan: ParallelPlan, groups: Groups) -> nn.Parameter:
    if plan.dp_replicate > 1:
        mesh = DeviceMesh("cpu", torch.arange(plan.world_size).view(plan.dp_replicate, -1))
        placements: list[Any] = [Replicate(), Shard(0)]
    else:
        mesh = DeviceMesh.from_group(groups.dp_shard.handle, "cpu")
        placements = [Shard(0)]
    return nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements))


def _whole(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()


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
    found = {
        name: check_muonclip(name, plan, registry, torchs_iteration_in_the_weights_dtype)
        if name.startswith("muonclip")
        else check(name, plan, registry)
        for name, plan in PLANS[world].items()
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
