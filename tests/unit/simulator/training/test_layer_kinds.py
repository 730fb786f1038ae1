"""Layers of one kind are priced once: what makes two layers differ makes two kinds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import ShardShape
from flopwright.simulator.training.layers import chunk_kinds, kind_of, representatives
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention, Mlp, ModelSpec, Moe


def _spec(**changes: Any) -> ModelSpec:
    attention: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return ModelSpec(
        name="windows", hidden_size=32, num_layers=6, vocab_size=64,
        attention=GqaAttention(**attention, sliding_window=16, first_window_layer=2),
        mlp=Mlp(intermediate_size=64), **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    "spec",
    [
        load_model("kimi_k2_mini"),
        _spec(),
        _spec(moe=Moe(num_experts=4, top_k=2, expert_intermediate_size=16, first_dense_layers=3)),
    ],
    ids=["k2_mini", "windows", "windows_moe"],
)
def test_a_kind_costs_what_each_of_its_layers_costs(spec: ModelSpec) -> None:
    shape, priced = ShardShape(seq_len=64), representatives(spec)
    for layer in range(-1, spec.num_layers + 1):
        own = layer_cost(spec, layer, shape).ops.total_flops()
        stands_for = layer_cost(spec, priced[kind_of(spec, layer)], shape).ops.total_flops()
        assert own == stands_for, layer
    counted = chunk_kinds(spec, 1, 1, None)
    assert dict(zip(priced, counted[:, 0].tolist(), strict=True)) == {
        kind: sum(kind_of(spec, i) == kind for i in range(-1, spec.num_layers + 1))
        for kind in priced
    }
    assert np.all(counted > 0)
