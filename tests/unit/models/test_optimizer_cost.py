"""Optimizer rows: bytes by hand, Newton-Schulz FLOPs by counting, K2's published total."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from flopwright.models.optim.adamw.cost import step_cost as adamw_cost
from flopwright.models.optim.adamw.module import build_optimizer, parameter_groups
from flopwright.models.optim.muon.cost import matrices_of, newton_schulz_flops
from flopwright.models.optim.muon.cost import step_cost as muon_cost
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.ops import OpKind, Phase
from flopwright.spec.load import load_model
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import Optimizer


def test_adamw_bytes() -> None:
    ops = adamw_cost(np.array([10.0, 1000.0]), num_candidates=2).ops
    assert set(ops.phase.tolist()) == {Phase.STEP}
    np.testing.assert_array_equal(ops.read_bytes[0], [160.0, 16_000.0])  # g, m, v, master
    np.testing.assert_array_equal(ops.written_bytes[0], [140.0, 14_000.0])  # m, v, master, bf16
    plain = adamw_cost(10.0, weights="fp32", master=None).ops
    assert (plain.read_bytes.item(), plain.written_bytes.item()) == (160.0, 120.0)


@pytest.mark.parametrize(("rows", "columns"), [(6, 10), (10, 6), (8, 8)])
def test_newton_schulz_flops_equal_its_products(
    rows: int, columns: int, flop_counter: Any
) -> None:
    x = torch.randn(rows, columns)
    if rows > columns:
        x = x.t()
    with flop_counter() as counter:
        for _ in range(5):
            gram = x @ x.t()
            x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    assert newton_schulz_flops(rows, columns) == counter.flops


def test_k2_experts_take_47_petaflop() -> None:
    spec = load_model("kimi_k2")
    matrices = [matrices_of(p) for p in parameters(spec) if p.role == "expert"]
    assert sum(int(np.asarray(m.count)) for m in matrices) == 384 * 60 * 3
    ops = muon_cost(matrices, 1e9).ops
    assert (ops.flops * ops.count).sum() / 1e15 == pytest.approx(47.5, abs=0.05)
    elementwise = ops.m[ops.kind == OpKind.OPTIMIZER].sum()
    assert elementwise == sum(p.numel for p in parameters(spec) if p.role == "expert") + 1e9


def test_only_matrices_decay() -> None:
    spec = load_model("kimi_k2_mini")
    stage = build_stage(spec, range(-1, 5))
    init_weights_(stage, spec, 0)
    decay, plain = parameter_groups(stage.named_parameters(), 0.1)
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all("norm" in n for n in plain["param_names"])
    assert not any("norm" in n for n in decay["param_names"])
    names = {n for n, _ in stage.named_parameters()}
    assert names == {*decay["param_names"], *plain["param_names"]}
    optimizer = build_optimizer(stage, Optimizer(beta2=0.9), 1e-3)
    assert [g["betas"] for g in optimizer.param_groups] == [(0.9, 0.9)] * 2
