"""Numbers of LoRA adapters on a rank: against a sum over named matrices."""

import numpy as np
import pytest

from flopwright.simulator.memory.parameters import adapter_counts
from flopwright.spec.load import load_model
from flopwright.spec.parameters import layer_parameters

LLAMA = load_model("llama2_70b")
MOE = load_model("qwen3_30b_a3b")
ONE = np.ones(1)


def test_llama2_70b_has_the_published_number_of_adapter_weights() -> None:
    """Rank 16 beside q, k, v and o of 80 layers; 2 r (h + n) a matrix pair by hand."""
    counts = adapter_counts(LLAMA, 0, ONE, ONE, 16, targets="attention")
    h, kv = 8192, 1024
    by_hand = 16 * ((h + h) + 2 * (h + kv) + (h + h))
    assert counts.dense[0] == by_hand
    assert counts.held[0] == by_hand
    assert counts.expert[0] == 0


def test_every_matrix_of_a_layer_has_one() -> None:
    counts = adapter_counts(MOE, 0, ONE, ONE, 4)
    wanted = sum(
        4 * sum(p.shape[-2:]) * (p.shape[0] if p.role == "expert" else 1)
        for p in layer_parameters(MOE, 0)
        if p.is_matrix and p.role != "router"
    )
    assert counts.held[0] == wanted


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_side_that_is_not_cut_stands_on_every_rank(tp: int) -> None:
    counts = adapter_counts(LLAMA, 0, np.array([float(tp)]), ONE, 16)
    h, kv, f = 8192, 1024, 28672
    columns = 16 * ((h + h / tp) + 2 * (h + kv / tp) + 2 * (h + f / tp))
    rows = 16 * ((h / tp + h) + (f / tp + h))
    assert counts.dense[0] == columns + rows


def test_tables_have_none() -> None:
    for layer in (-1, LLAMA.num_layers):
        assert adapter_counts(LLAMA, layer, ONE, ONE, 16).held[0] == 0


def test_adapters_of_queries_keys_and_values_leave_the_output_out() -> None:
    attention = adapter_counts(LLAMA, 0, ONE, ONE, 16, targets="attention")
    qkv = adapter_counts(LLAMA, 0, ONE, ONE, 16, targets="qkv")
    width = LLAMA.attention.num_heads * LLAMA.attention.v_head_dim
    assert float(attention.held[0] - qkv.held[0]) == 16 * (width + LLAMA.hidden_size)
