"""Per-Head Muon: each head's rows move as torch.optim.Muon moves a matrix that is those rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
import torch
from torch import Tensor, nn

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel.interface import Trainable
from flopwright.executor.parallel.groups import Group, Groups
from flopwright.executor.parallel.optimizers import make_optimizer, parameter_groups
from flopwright.models.optim.muon.layout import matrix_layouts
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import Optimizer, Precision

STEPS, LR, F64 = 4, 0.05, torch.float64
OPTIMIZER: Final = Optimizer(kind="muon", per_head=True, weight_decay=0.1, momentum=0.9)

# Rows that are a matrix of their own, from the first on. In the latent attention of K3's miniature
# a head has 32 + 16 rows of queries, and 32 of keys above 32 of values.
ROWS: Final[dict[str, dict[str, list[int]]]] = {
    "kimi_k3_mini": {
        "0.self_attn.q_proj": [32] * 4,
        "0.self_attn.k_proj": [32] * 4,
        "0.self_attn.v_proj": [32] * 4,
        "0.self_attn.f_b_proj": [128],
        "0.self_attn.g_proj": [128],
        "0.self_attn.o_proj": [192],
        "3.self_attn.q_a_proj": [96],
        "3.self_attn.q_b_proj": [48] * 4,
        "3.self_attn.kv_b_proj": [32, 32] * 4,
        "3.self_attn.o_proj": [192],
    },
    "llama_mini": {
        "0.self_attn.q_proj": [32] * 6,
        "0.self_attn.k_proj": [32] * 2,
        "0.self_attn.v_proj": [32] * 2,
        "0.self_attn.o_proj": [192],
    },
}


@contextmanager
def _torchs_iteration_in_fp64() -> Iterator[None]:
    """torch.optim.Muon casts to bf16 whatever it is given; here the cast only copies."""
    cast = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.clone()  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = cast  # type: ignore[method-assign]


def _one_rank() -> Groups:
    alone = Group((0,), 0, None)
    names = [n for n in Groups.__dataclass_fields__ if n != "coordinates"]
    return Groups(**dict.fromkeys(names, alone), coordinates={})


def _start(spec: ModelSpec, matrices: dict[str, list[int]]) -> dict[str, Tensor]:
    """Returns random weights of the model's shapes, by full name."""
    shapes = {p.name: p.shape for p in parameters(spec)}
    generator = torch.Generator().manual_seed(2)
    names = [f"model.layers.{m}.weight" for m in matrices]
    return {n: torch.randn(shapes[n], generator=generator, dtype=F64) for n in names}


def _gradients(start: dict[str, Tensor], step: int) -> dict[str, Tensor]:
    """Returns gradients whose last head is far larger than its first."""
    generator = torch.Generator().manual_seed(100 + step)
    return {
        n: torch.randn(w.shape, generator=generator, dtype=F64)
        * torch.linspace(0.1, 10, w.shape[0], dtype=F64).unsqueeze(1)
        for n, w in start.items()
    }


def _ours(name: str, *, per_head: bool) -> dict[str, Tensor]:
    """Returns the weights after STEPS updates of the executor's optimizer on one rank."""
    spec = load_model(name)
    start = _start(spec, ROWS[name])
    held = {n: nn.Parameter(w.clone()) for n, w in start.items()}
    trainable = Trainable(
        parameters=held,
        expert_names=frozenset(),
        groups=_one_rank(),
        optimizer=OPTIMIZER,
        precision=Precision(
            compute="fp64", weights="fp64", gradients="fp64", master_weights="none",
            optimizer_state="fp64",
        ),
        timer=ActionTimer(0, torch.device("cpu")),
        matrices=matrix_layouts(spec, ParallelPlan(), per_head=per_head),
    )  # fmt: skip
    optimizer = make_optimizer(parameter_groups(trainable), trainable)
    for group in optimizer.param_groups:
        group["lr"] = LR
    for step in range(STEPS):
        for n, gradient in _gradients(start, step).items():
            held[n].grad = gradient
        optimizer.step()
    return {n: p.detach() for n, p in held.items()}


def _torchs(name: str) -> dict[str, Tensor]:
    """Returns the same of torch.optim.Muon, which is given each head's rows as a matrix."""
    start = _start(load_model(name), ROWS[name])
    rows = dict(zip(start, ROWS[name].values(), strict=True))
    heads = {
        n: [nn.Parameter(part.clone()) for part in w.split(rows[n])] for n, w in start.items()
    }
    optimizer = torch.optim.Muon(
        [part for parts in heads.values() for part in parts],
        lr=LR,
        momentum=OPTIMIZER.momentum,
        weight_decay=OPTIMIZER.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    for step in range(STEPS):
        for n, gradient in _gradients(start, step).items():
            for part, own in zip(heads[n], gradient.split(rows[n]), strict=True):
                part.grad = own.clone()
        with _torchs_iteration_in_fp64():
            optimizer.step()
    return {n: torch.cat([p.detach() for p in parts]) for n, parts in heads.items()}


@pytest.mark.parametrize("name", ROWS)
def test_each_head_moves_as_a_matrix_of_its_own(name: str) -> None:
    found, expected = _ours(name, per_head=True), _torchs(name)
    assert found.keys() == expected.keys()
    for matrix, weight in expected.items():
        torch.testing.assert_close(found[matrix], weight, rtol=1e-12, atol=1e-13, msg=matrix)


@pytest.mark.parametrize("name", ROWS)
def test_whole_matrices_move_otherwise(name: str) -> None:
    """Where a matrix has heads, by more than a tenth of how far it moved; else not at all."""
    apart, whole = _ours(name, per_head=True), _ours(name, per_head=False)
    start = _start(load_model(name), ROWS[name])
    for matrix, rows in zip(start, ROWS[name].values(), strict=True):
        moved = (apart[matrix] - start[matrix]).norm()
        difference = (apart[matrix] - whole[matrix]).norm() / moved
        assert (difference > 0.1) if len(rows) > 1 else (difference == 0), matrix
