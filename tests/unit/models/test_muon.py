"""Muon's arithmetic against torch.optim.Muon and against the polynomial it stands for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flopwright.kernels.newton_schulz.reference import COEFFICIENTS
from flopwright.models.optim.muon.cost import compute_dtype, matrices_of
from flopwright.models.optim.muon.layout import matrix_layouts
from flopwright.models.optim.muon.module import (
    blend_,
    newton_schulz,
    orthogonalise,
    update_scale,
)
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_model
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import Precision

SHAPES = [(8, 24), (24, 8), (16, 16), (1, 5), (5, 1)]


def matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_bf16_it_is_torchs_bit_for_bit(shape: tuple[int, int]) -> None:
    theirs = torch.nn.Parameter(matrix(*shape))
    optimizer = torch.optim.Muon(
        [theirs], lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    weight = theirs.detach().clone()
    momentum = torch.zeros_like(weight)
    for step in range(4):
        gradient = matrix(*shape) * (step + 1) + step
        theirs.grad = gradient.clone()
        optimizer.step()
        update = newton_schulz(blend_(momentum, gradient, 0.9).bfloat16())
        weight.mul_(1 - 0.02 * 0.1).add_(update, alpha=-0.02 * update_scale(*shape))
        assert torch.equal(weight, theirs)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_go_through_the_polynomial(shape: tuple[int, int]) -> None:
    x = matrix(*shape, torch.float64)
    u, s, vt = np.linalg.svd(x.numpy(), full_matrices=False)
    s = s / np.linalg.norm(x.numpy())
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    assert np.allclose(newton_schulz(x).numpy(), u @ np.diag(s) @ vt, rtol=0, atol=1e-11)


def test_well_conditioned_matrices_come_out_nearly_orthogonal() -> None:
    values = torch.linalg.svdvals(newton_schulz(matrix(64, 192)))
    assert values.min() > 0.65
    assert values.max() < 1.25


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_stack_is_its_matrices(dtype: torch.dtype) -> None:
    mixed = [matrix(*shape, dtype) for shape in (*SHAPES, *SHAPES, (8, 24))]
    bound = 2e-6 if dtype == torch.float32 else 1e-14
    for one, result in zip(mixed, orthogonalise(mixed), strict=True):
        assert torch.allclose(result, newton_schulz(one), rtol=0, atol=bound * 100)
    stack = torch.stack([matrix(8, 24, dtype), 2 * matrix(8, 24, dtype)]).view(2, 1, 8, 24)
    assert newton_schulz(stack).shape == stack.shape


def test_a_stack_is_iterated_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flopwright.models.optim.muon.module._STACK_NUMBERS", 2 * 8 * 24)
    mixed = [matrix(8, 24, torch.float64) * (i + 1) for i in range(5)]
    expected = newton_schulz(mixed[0])
    for result in orthogonalise(mixed):
        assert torch.allclose(result, expected, rtol=0, atol=1e-12)


def test_zeros_stay_zeros() -> None:
    assert not newton_schulz(torch.zeros(4, 6)).any()
    assert not newton_schulz(torch.zeros(3, 6, 4)).any()


def test_an_update_is_as_large_as_adamws() -> None:
    update = newton_schulz(matrix(96, 256, torch.float64)) * update_scale(96, 256)
    # Singular values near 1: the root mean square is about 0.2 sqrt(max) sqrt(min / (a b)).
    assert math.isclose(float(update.square().mean().sqrt()), 0.2, rel_tol=0.15)


def test_the_iteration_is_as_wide_as_the_run() -> None:
    wide = {"fp32": "fp32", "fp64": "fp64", "bf16": "bf16", "fp16": "bf16"}
    for compute, expected in wide.items():
        assert compute_dtype(Precision(compute=compute, weights=compute)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["kimi_k2", "llama31_8b"])
def test_layouts_are_the_matrices_of_the_cost(name: str) -> None:
    spec = load_model(name)
    layouts = matrix_layouts(spec, ParallelPlan())
    priced = {p.name: matrices_of(p) for p in parameters(spec) if p.is_matrix and p.trainable}
    assert layouts.keys() == priced.keys()
    shapes = {p.name: p.shape for p in parameters(spec)}
    for tensor, layout in layouts.items():
        *stack, rows, columns = shapes[tensor]
        assert priced[tensor].rows == rows // layout.parts
        assert priced[tensor].columns == columns
        assert priced[tensor].count == math.prod(stack) * layout.parts


def test_a_slices_layout_says_what_is_cut() -> None:
    layouts = matrix_layouts(load_model("kimi_k2"), ParallelPlan(tp=2, dp_shard=4, ep=4, etp=2))
    first = "model.layers.1."
    cut = {n.removeprefix(first): x for n, x in layouts.items() if n.startswith(first)}
    assert cut["self_attn.q_b_proj.weight"].axis == "tp"
    assert cut["self_attn.q_b_proj.weight"].dim == 0
    assert cut["self_attn.o_proj.weight"].dim == 1
    assert cut["self_attn.q_a_proj.weight"].axis == ""
    assert cut["mlp.gate.weight"].axis == ""
    assert (cut["mlp.experts.gate_up_proj"].axis, cut["mlp.experts.gate_up_proj"].dim) == (
        "etp",
        0,
    )
    assert (cut["mlp.experts.down_proj"].axis, cut["mlp.experts.down_proj"].dim) == ("etp", 1)
    assert cut["mlp.experts.gate_up_proj"].parts == 2
