"""Which products get an adapter: names of the rows that are added."""

from __future__ import annotations

import pytest

from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import ShardShape
from flopwright.simulator.training.lora import with_adapters
from flopwright.spec.load import load_model
from flopwright.spec.workload import LoraTargets


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("qkv", {"q_proj", "k_proj", "v_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (
            "all",
            {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        ),
    ],
)
def test_targets_name_the_adapted_products(targets: LoraTargets, adapted: set[str]) -> None:
    shape = ShardShape(micro_batch_size=1, seq_len=128)
    cost = layer_cost(load_model("llama31_8b"), 5, shape)
    ops = with_adapters(cost, 8, "bf16", "dense", targets).ops
    found = {n.split(".")[1] for n in ops.name if n.endswith(".lora")}
    assert found == adapted
