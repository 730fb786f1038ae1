"""Fields that models gained: older files keep their hash, every choice survives a file."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from flopwright.spec.cache import sequence_cache_bytes
from flopwright.spec.flops import attention_flops_per_token
from flopwright.spec.load import load_model
from flopwright.spec.model import (
    GqaAttention,
    LinearScaling,
    Llama3Scaling,
    Mlp,
    ModelSpec,
    Rope,
    YarnScaling,
)
from flopwright.spec.parameters import num_params, parameters


def _gpt2(**attention: Any) -> ModelSpec:
    gqa: dict[str, Any] = {"num_heads": 12, "num_kv_heads": 12, "head_dim": 64, "rope": None}
    return ModelSpec(
        name="gpt2", hidden_size=768, num_layers=12, vocab_size=50257, max_seq_len=1024,
        tied_embeddings=True, positions="learned", norm="layer_norm",
        attention=GqaAttention(**(gqa | {"bias": True, "o_bias": True} | attention)),
        mlp=Mlp(kind="gelu", intermediate_size=3072, bias=True),
    )  # fmt: skip


def test_files_from_before_the_fields_keep_their_hash() -> None:
    known = {
        "kimi_k2": "62ffd048a165350d",
        "kimi_k2_mini": "2138837192e36e54",
        "first_steps": "30183b4e730b56e3",
    }
    assert {name: load_model(name).content_hash() for name in known} == known


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        YarnScaling(factor=4, original_max_seq_len=32768),
        LinearScaling(factor=2),
        Llama3Scaling(factor=8, original_max_seq_len=8192),
    ],
)
def test_every_choice_survives_a_file(scaling: Any) -> None:
    specs = (
        _gpt2(),
        _gpt2(o_bias=False),
        _gpt2(rope=Rope(theta=5.0, scaling=scaling)),
        _gpt2(sliding_window=128, first_window_layer=3),
    )
    for spec in specs:
        again = ModelSpec.model_validate(spec.to_data())
        assert again == spec
        assert again.content_hash() == spec.content_hash()
    assert len({spec.content_hash() for spec in specs}) == len(specs)


def test_a_scaling_without_kind_is_yarn() -> None:
    rope = Rope.model_validate({"scaling": {"factor": 2, "original_max_seq_len": 8}})
    assert isinstance(rope.scaling, YarnScaling)
    with pytest.raises(ValidationError, match="low_freq_factor"):
        Llama3Scaling(factor=8, original_max_seq_len=8192, low_freq_factor=4)


def test_a_rotary_width_is_even() -> None:
    mla = load_model("kimi_k2_mini").to_data()
    mla["attention"]["qk_rope_head_dim"] = 15
    with pytest.raises(ValidationError, match=r"qk_rope_head_dim \(15\) must be even.*16"):
        ModelSpec.model_validate(mla)
    with pytest.raises(ValidationError, match=r"head_dim \(63\) must be even"):
        _gpt2(head_dim=63, rope=Rope())
    assert _gpt2(head_dim=63).attention.qk_head_dim == 63


def test_gpt2_has_its_published_number_of_weights() -> None:
    assert num_params(_gpt2()) == 124_439_808  # openai/gpt-2 "124M", as transformers counts it
    names = {p.name for p in parameters(_gpt2())}
    assert {"model.norm.bias", "model.layers.11.mlp.down_proj.bias"} <= names
    assert "model.layers.0.self_attn.o_proj.bias" in names


def test_a_window_bounds_cache_and_attention() -> None:
    whole, cut = _gpt2(), _gpt2(sliding_window=128, first_window_layer=3)
    assert [cut.sliding_window(i) for i in (0, 2, 3, 11)] == [None, None, 128, 128]
    token_and_layer = 2 * 12 * 64 * 2
    assert sequence_cache_bytes(whole, 1000) == 12 * 1000 * token_and_layer
    assert sequence_cache_bytes(cut, 1000) == (3 * 1000 + 9 * 128) * token_and_layer
    assert sequence_cache_bytes(cut, 100) == sequence_cache_bytes(whole, 100)
    assert attention_flops_per_token(cut, 128) == attention_flops_per_token(whole, 128)
    # A query sees at most 128 positions: sum the pairs one by one.
    pairs = sum(min(i + 1, 128) for i in range(4096))
    flops = 3 * 2 * 2 * 768 * (9 * pairs + 3 * 4096 * 4097 / 2) / 4096
    assert attention_flops_per_token(cut, 4096) == pytest.approx(flops, rel=5e-3)
