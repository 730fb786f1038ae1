"""Small models keep the kinds and proportions of the ones they come from."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.models.transformer.module import build_stage, init_weights_, loss
from flopwright.spec.load import MODEL_CATALOG, catalog_names, load_model
from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec
from flopwright.spec.parameters import num_params, parameters

RELEASED = [n for n in catalog_names(MODEL_CATALOG) if not n.startswith("gpt_")]
# Multi-token prediction is priced and has no module yet.
NAMES = [
    name
    for name in (*RELEASED, "gpt_h2304_l24", "gpt_h14336_l70_a112_v251k")
    if not load_model(name).mtp_layers
]


def kept(small: ModelSpec, spec: ModelSpec) -> None:
    """Asserts what shrinking must not change."""
    assert small.family == spec.family
    for field in ("norm", "norm_eps", "positions", "tied_embeddings"):
        assert getattr(small, field) == getattr(spec, field)
    assert small.mlp.kind == spec.mlp.kind
    assert small.mlp.bias == spec.mlp.bias
    a, b = small.attention, spec.attention
    assert type(a) is type(b)
    if isinstance(a, MlaAttention) and isinstance(b, MlaAttention):
        assert (a.q_lora_rank is None) == (b.q_lora_rank is None)
        assert a.qk_rope_head_dim % 2 == 0
        assert (a.rope is None) == (b.rope is None)
        if a.rope is not None and b.rope is not None:
            assert (a.rope.scaling is None) == (b.rope.scaling is None)
        assert a.qk_rope_head_dim <= a.qk_nope_head_dim
    if isinstance(a, GqaAttention) and isinstance(b, GqaAttention):
        assert a.num_heads * b.num_kv_heads == b.num_heads * a.num_kv_heads
        assert (a.qk_norm, a.bias, a.o_bias) == (b.qk_norm, b.bias, b.o_bias)
        assert a.head_dim % 2 == 0
    assert (small.moe is None) == (spec.moe is None)
    if small.moe is not None and spec.moe is not None:
        few, many = small.moe, spec.moe
        assert few.router == many.router
        assert few.num_shared_experts == many.num_shared_experts
        assert few.routed_scaling_factor == many.routed_scaling_factor
        assert few.first_dense_layers == min(many.first_dense_layers, small.num_layers - 1)
        assert few.top_k <= few.num_experts
        assert few.num_experts % few.num_groups == 0
        # The chosen groups hold enough experts to choose from.
        assert few.top_k <= few.top_k_groups * few.num_experts // few.num_groups
        assert few.top_k_groups <= few.num_groups


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_size_is_valid_builds_and_keeps_its_kind(data: st.DataObject) -> None:
    spec = load_model(data.draw(st.sampled_from(NAMES)))
    sizes: dict[str, Any] = {
        "hidden_size": 2 * data.draw(st.integers(1, spec.hidden_size // 2)),
        "num_layers": data.draw(st.integers(1, min(6, spec.num_layers))),
        "vocab_size": data.draw(st.none() | st.integers(1, spec.vocab_size)),
        "max_seq_len": data.draw(st.none() | st.integers(1, spec.max_seq_len)),
    }
    if spec.moe is not None:
        experts = data.draw(st.none() | st.integers(1, spec.moe.num_experts))
        most = min(spec.moe.top_k, experts or spec.moe.num_experts)
        sizes["num_experts"] = experts
        sizes["top_k"] = data.draw(st.none() | st.integers(1, most))
    small = spec.shrunk(**sizes)
    kept(small, spec)
    for field, value in sizes.items():
        owner = small.moe if field in {"num_experts", "top_k"} else small
        assert value is None or getattr(owner, field) == value
    stage = build_stage(small, range(-1, small.num_layers + 1), device="meta")
    held = {n: tuple(t.shape) for n, t in (*stage.named_parameters(), *stage.named_buffers())}
    assert held == {p.name: p.shape for p in parameters(small) if not p.tied}


def test_chosen_groups_always_hold_enough_experts() -> None:
    spec = load_model("deepseek_v3")
    for experts in range(1, 33):
        for top_k in range(1, min(experts, 8) + 1):
            small = spec.shrunk(hidden_size=64, num_layers=4, num_experts=experts, top_k=top_k)
            kept(small, spec)
            assert small.moe is not None
            # The two best scores of a group are its score.
            assert small.moe.num_groups == 1 or experts // small.moe.num_groups >= 2


@pytest.mark.parametrize("name", NAMES)
def test_proportions_stay_within_rounding(name: str) -> None:
    spec = load_model(name)
    hidden = spec.hidden_size // 8 * 2
    scale = hidden / spec.hidden_size
    small = spec.shrunk(hidden_size=hidden, num_layers=min(spec.num_layers, 4))
    width = small.mlp.intermediate_size - spec.mlp.intermediate_size * scale
    assert abs(width) <= 8
    heads = small.attention.num_heads * small.attention.v_head_dim / hidden
    before = spec.attention.num_heads * spec.attention.v_head_dim / spec.hidden_size
    assert 0.7 * before <= heads <= 1.4 * before or small.attention.v_head_dim == 8
    if small.moe is not None and spec.moe is not None:
        assert small.moe.sparsity == pytest.approx(spec.moe.sparsity, rel=0.1)
        expert = spec.moe.expert_intermediate_size * scale
        assert abs(small.moe.expert_intermediate_size - expert) <= 8


@pytest.mark.parametrize("name", NAMES)
def test_fewer_layers_alone_change_nothing_else(name: str) -> None:
    spec = load_model(name)
    cut = spec.shrunk(
        hidden_size=spec.hidden_size,
        num_layers=1 + (spec.moe.first_dense_layers if spec.moe else 0),
        vocab_size=spec.vocab_size,
        max_seq_len=spec.max_seq_len,
    )
    changed = {"name", "source", "num_layers", "full_attention_layers", "attn_res_block"}
    found, own = cut.model_dump(exclude=changed), spec.model_dump(exclude=changed)
    if own["attention"].get("first_window_layer"):  # it keeps its place in the depth
        place = found["attention"].pop("first_window_layer", 0)
        assert place < cut.num_layers <= own["attention"].pop("first_window_layer")
    assert found == own


def test_the_benchmark_size_of_k2() -> None:
    small = load_model("kimi_k2").shrunk(hidden_size=256, num_layers=4, num_experts=16, top_k=4)
    assert small.moe is not None
    assert (small.moe.num_experts, small.moe.top_k, small.moe.first_dense_layers) == (16, 4, 1)
    assert isinstance(small.attention, MlaAttention)
    a = small.attention
    assert (a.num_heads, a.qk_nope_head_dim, a.qk_rope_head_dim, a.v_head_dim) == (16, 16, 8, 16)
    assert num_params(small) < 10_000_000


def test_windows_and_context_extensions_shrink_with_the_context() -> None:
    spec = load_model("kimi_k2").shrunk(hidden_size=64, num_layers=2, max_seq_len=4096)
    assert isinstance(spec.attention, MlaAttention)
    assert spec.attention.rope is not None
    scaling = spec.attention.rope.scaling
    assert scaling is not None
    assert scaling.kind == "yarn"
    assert (scaling.factor, scaling.original_max_seq_len) == (32, 128)
    qwen = load_model("qwen25_32b")
    assert isinstance(qwen.attention, GqaAttention)
    update = {"sliding_window": 32768, "first_window_layer": 32}
    windowed = qwen.model_copy(update={"attention": qwen.attention.model_copy(update=update)})
    small = windowed.shrunk(hidden_size=64, num_layers=4, max_seq_len=1024)
    assert [small.sliding_window(i) for i in range(4)] == [None, None, 256, 256]


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"hidden_size": 8192}, "hidden_size"),
        ({"hidden_size": 63}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_layers": 62}, "num_layers"),
        ({"num_experts": 385}, "num_experts"),
        ({"num_experts": 2, "top_k": 3}, "top_k"),
        ({"vocab_size": 10**6}, "vocab_size"),
        ({"max_seq_len": -1}, "max_seq_len"),
    ],
)
def test_sizes_that_are_not_smaller_are_refused(sizes: dict[str, int], field: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model("kimi_k2").shrunk(**{"hidden_size": 64, "num_layers": 2, **sizes})
    assert [v.field for v in caught.value.violations] == [field]


def test_experts_of_a_model_without_any_are_refused() -> None:
    with pytest.raises(InputError, match="no experts"):
        load_model("llama2_7b").shrunk(hidden_size=64, num_layers=2, num_experts=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", RELEASED)
def test_a_shrunk_model_learns_on_a_cpu(name: str) -> None:
    full = load_model(name)
    spec = full.shrunk(
        hidden_size=min(64, full.hidden_size),
        num_layers=min(2, full.num_layers),
        vocab_size=min(32, full.vocab_size),
        max_seq_len=64,
    )
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, seed=0)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(spec.vocab_size, (4, 33), generator=generator)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    for _ in range(30):
        optimizer.zero_grad()
        value = loss(stage(tokens[:, :-1]), tokens[:, 1:])
        value.backward()
        optimizer.step()
    # It starts at ln(vocabulary) and learns these few sequences by heart.
    assert value.item() < 0.7 * math.log(spec.vocab_size)
