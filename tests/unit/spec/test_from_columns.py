"""Models from the columns of a table: what is right, what is assumed, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.spec.from_columns import model_from_columns
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention, ModelSpec
from flopwright.spec.parameters import num_params


def same(columns: ModelSpec, name: str) -> bool:
    """Returns whether the columns give the catalog's model, but for what no column says."""
    unsaid = {"name", "source", "family", "max_seq_len", "norm_eps", "attention", "moe"}
    spec = load_model(name)
    a, b = columns.attention, spec.attention
    assert isinstance(a, GqaAttention)
    assert isinstance(b, GqaAttention)
    heads = {"num_heads", "num_kv_heads", "head_dim", "bias", "o_bias", "qk_norm"}
    return (
        columns.model_dump(exclude=unsaid) == spec.model_dump(exclude=unsaid)
        and a.model_dump(include=heads) == b.model_dump(include=heads)
        and columns.moe == spec.moe
    )


def test_full_rows_give_the_catalog_models() -> None:
    assert same(model_from_columns(8192, 80, 64, 8, 28672, vocab=128256).spec, "llama31_70b")
    assert same(model_from_columns(4096, 32, 32, 32, 11008, vocab=32000).spec, "llama2_7b")
    assert same(model_from_columns(4096, 32, 32, 8, None, 8, 2, 14336, 32000).spec, "mixtral_8x7b")
    assert same(model_from_columns(12288, 96, 96, 96, 49152, vocab=50257).spec, "gpt3_175b")
    assert same(model_from_columns(25600, 128, 160, vocab=51200).spec, "gpt_h25600_l128")


def test_gaps_are_filled_and_named() -> None:
    model = model_from_columns(12288, 80)
    assert same(model.spec, "gpt_h12288_l80")
    named = " ".join(model.assumptions)
    for word in ("heads of width 128 (96)", "KV heads", "4 * hidden (49152)", "GELU", "51200"):
        assert word in named
    assert all(words in model.spec.source for words in model.assumptions)


def test_a_llama_without_its_width_gets_the_usual_one() -> None:
    model = model_from_columns(4096, 32, 32, 8, vocab=128256)
    assert model.spec.mlp.intermediate_size == 11008
    assert any("11008" in words for words in model.assumptions)
    assert model_from_columns(5120, 40, 40, 40).spec.mlp.intermediate_size == 13824


def test_experts_take_the_dense_width_where_theirs_is_missing() -> None:
    model = model_from_columns(2048, 24, 16, 4, None, 8, 2)
    assert model.spec.moe is not None
    assert model.spec.moe.expert_intermediate_size == 5632
    assert any("as wide as the dense block (5632)" in words for words in model.assumptions)
    model = model_from_columns(5120, 4, 128, 128, 1536, 160, 6)
    assert model.spec.moe is not None
    assert model.spec.moe.expert_intermediate_size == 1536


def test_a_dense_width_beside_experts_is_said_to_be_unused() -> None:
    model = model_from_columns(7168, 61, 128, None, 18432, 256, 8, 2048, 129280)
    assert any("18432" in words for words in model.assumptions)
    assert any("none shared" in words for words in model.assumptions)


def test_a_head_width_that_does_not_divide_is_said() -> None:
    model = model_from_columns(2880, 24, 64, 8, None, 32, 4, 2880, 201088)
    assert any("even number (44)" in words for words in model.assumptions)


@pytest.mark.parametrize(
    ("columns", "field"),
    [
        ({"hidden": 0}, "hidden"),
        ({"hidden": 64.0}, "hidden"),
        ({"layers": -1}, "layers"),
        ({"topk": 2}, "topk"),
        ({"moe_ffn": 64}, "moe_ffn"),
        ({"heads": 4, "kv_heads": 3}, "attention"),
        ({"experts": 4, "topk": 5}, "moe"),
    ],
)
def test_columns_that_contradict_are_refused(columns: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError, match=field):
        model_from_columns(**{"hidden": 64, "layers": 2, **columns})


@given(
    hidden=st.integers(1, 1000).map(lambda n: 8 * n),
    layers=st.integers(1, 200),
    kv=st.integers(1, 16),
    group=st.none() | st.integers(1, 8),
    ffn=st.none() | st.integers(1, 100_000),
    experts=st.none() | st.integers(2, 512),
    vocab=st.none() | st.integers(1, 300_000),
)
def test_any_consistent_columns_give_a_model(
    hidden: int,
    layers: int,
    kv: int,
    group: int | None,
    ffn: int | None,
    experts: int | None,
    vocab: int | None,
) -> None:
    heads = None if group is None else group * kv
    kv_heads = None if group is None else kv
    model = model_from_columns(hidden, layers, heads, kv_heads, ffn, experts, vocab=vocab)
    spec = model.spec
    assert (spec.hidden_size, spec.num_layers) == (hidden, layers)
    assert heads is None or spec.attention.num_heads == heads
    assert vocab is None or spec.vocab_size == vocab
    assert num_params(spec) > 0
    assert (vocab is None) == any("vocabulary" in words for words in model.assumptions)


def test_what_is_known_beyond_the_columns_gives_the_catalog_models() -> None:
    v3 = model_from_columns(
        7168, 61, 128, None, 18432, 256, 8, 2048, 129280,
        latent={"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64, "v_head_dim": 128},
        shared_experts=1, first_dense_layers=3, router="sigmoid_noaux_tc",
    )  # fmt: skip
    assert num_params(v3.spec) == num_params(load_model("deepseek_v3"))
    qwen = model_from_columns(
        4096, 36, 32, 8, 12288, vocab=151936, head_dim=128, qk_norm=True, style="llama"
    )
    assert num_params(qwen.spec) == num_params(load_model("qwen3_8b"))
    assert not any("head width" in words for words in qwen.assumptions)


def test_a_style_decides_the_block_around_the_matrices() -> None:
    def params(style: Any, **keywords: Any) -> int:
        sizes = {"vocab": 100, "max_seq_len": 10, "style": style, **keywords}
        return num_params(model_from_columns(64, 2, 4, 4, 256, **sizes).spec)

    matrices = 2 * (4 * 64 * 64 + 2 * 64 * 256)
    norms = 2 * (2 * 2 * 64) + 2 * 64  # LayerNorm has a bias
    assert params("mpt") == matrices + norms + 110 * 64
    assert params("nemotron") == matrices + norms + 200 * 64
    assert params("nemotron", tied=True) == matrices + norms + 100 * 64
    biases = 2 * (4 * 64 + 256 + 64)
    assert params("gpt") == matrices + norms + 110 * 64 + biases
    assert params("llama") == 2 * (4 * 64 * 64 + 3 * 64 * 256 + 2 * 64) + 64 + 200 * 64
