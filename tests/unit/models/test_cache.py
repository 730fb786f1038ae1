"""Caches: what comes out with them equals the full forward, and they are as big as said."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flopwright.models.attention_mla.module import LatentAttention
from flopwright.models.cache import make_cache
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.spec.cache import cache_bytes_per_token, sequence_cache_bytes
from flopwright.spec.load import load_model
from flopwright.spec.model import (
    GqaAttention,
    MlaAttention,
    Mlp,
    ModelSpec,
    Moe,
    Rope,
    YarnScaling,
)

pytestmark = pytest.mark.slow

VOCAB, SEQ = 53, 24
MLA: dict[str, Any] = {
    "num_heads": 3, "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5,
}  # fmt: skip
GQA: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 6}
YARN = Rope(scaling=YarnScaling(factor=8, original_max_seq_len=8, mscale_all_dim=1))
MOE = Moe(num_experts=6, top_k=2, expert_intermediate_size=12, num_shared_experts=1)


def _spec(attention: Any, **changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small", "hidden_size": 24, "num_layers": 3, "vocab_size": VOCAB,
        "max_seq_len": 32, "mlp": Mlp(intermediate_size=40),
    }  # fmt: skip
    return ModelSpec(attention=attention, **(data | changes))


SPECS = {
    "mla": _spec(MlaAttention(**MLA)),
    "mla_yarn_moe": _spec(MlaAttention(**(MLA | {"q_lora_rank": None, "rope": YARN})), moe=MOE),
    "gqa": _spec(GqaAttention(**GQA, qk_norm=True, bias=True)),
    "mha": _spec(GqaAttention(**(GQA | {"num_kv_heads": 4}))),
    "window": _spec(GqaAttention(**GQA, sliding_window=5)),
    "window_of_later_layers": _spec(
        GqaAttention(**GQA, sliding_window=7, first_window_layer=1), moe=MOE
    ),
    "learned_positions": _spec(
        GqaAttention(**(GQA | {"num_kv_heads": 4, "rope": None}), bias=True, o_bias=True),
        mlp=Mlp(kind="gelu", intermediate_size=40, bias=True), norm="layer_norm",
        positions="learned", tied_embeddings=True,
    ),
}  # fmt: skip


def _stage(spec: ModelSpec, dtype: torch.dtype, layers: range | None = None) -> Stage:
    stage = build_stage(spec, layers or range(-1, spec.num_layers + 1), dtype=dtype).eval()
    init_weights_(stage, spec, 3)
    with torch.no_grad():  # no symmetry of fresh weights may hide a mistake
        for name, p in stage.named_parameters():
            seed = torch.Generator().manual_seed(sum(name.encode()))
            p.add_(torch.randn(p.shape, generator=seed) * 0.1)
    return stage


def _tokens() -> Tensor:
    return torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(5))


def _in_pieces(stages: list[Stage], tokens: Tensor, pieces: list[int]) -> Tensor:
    caches = [stage.make_cache(tokens.shape[0], tokens.shape[1]) for stage in stages]
    out = []
    for piece in tokens.split(pieces, 1):
        for stage, cache in zip(stages, caches, strict=True):
            piece = stage(piece, cache)
        out.append(piece)
    return torch.cat(out, 1)


PIECES = {
    "one by one": [1] * SEQ,
    "prompt, then one by one": [10] + [1] * (SEQ - 10),
    "chunks": [4, 3, 9, 1, 7],
}


@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_logits_equal_the_full_forward(name: str, pieces: list[int]) -> None:
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        stage, tokens = _stage(SPECS[name], dtype), _tokens()
        full = stage(tokens)
        found = _in_pieces([stage], tokens, pieces)
        assert (found - full).abs().max() <= tolerance * full.abs().max()


@pytest.mark.parametrize("name", SPECS)
@torch.no_grad()
def test_greedy_text_is_the_same_token_for_token(name: str) -> None:
    stage, ids = _stage(SPECS[name], torch.float32), _tokens()[:, :4]
    cache, cached = stage.make_cache(2, 30), ids
    for _ in range(26):
        ids = torch.cat((ids, stage(ids)[:, -1:].argmax(-1)), 1)
        new = stage(cached[:, cache.positions :], cache)
        cached = torch.cat((cached, new[:, -1:].argmax(-1)), 1)
    assert torch.equal(ids, cached)
    assert cache.positions == 29


@torch.no_grad()
def test_two_stages_keep_their_own() -> None:
    spec, tokens = SPECS["mla_yarn_moe"], _tokens()
    stages = [_stage(spec, torch.float64, r) for r in (range(-1, 1), range(1, 4))]
    full = _stage(spec, torch.float64)(tokens)
    torch.testing.assert_close(_in_pieces(stages, tokens, [10, 1, 13]), full)


@pytest.mark.parametrize("name", ["mla", "mla_yarn_moe"])
@torch.no_grad()
def test_absorbed_attention_equals_the_plain_form(name: str) -> None:
    stage, tokens = _stage(SPECS[name], torch.float64), _tokens()
    absorbed = _in_pieces([stage], tokens, PIECES["chunks"])
    for module in stage.modules():
        if isinstance(module, LatentAttention):
            module.absorb = False
    plain = _in_pieces([stage], tokens, PIECES["chunks"])
    torch.testing.assert_close(absorbed, plain, rtol=1e-11, atol=1e-12)
    assert not torch.equal(absorbed, plain)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_bytes_are_those_of_the_spec(name: str, dtype: torch.dtype, width: int) -> None:
    spec = SPECS[name]
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=dtype)
    for capacity in (1, 6, 30):
        cache = stage.make_cache(2, capacity)
        assert cache.nbytes() == 2 * sequence_cache_bytes(spec, capacity, width)


def test_k2_keeps_70272_bytes_a_token() -> None:
    spec = load_model("kimi_k2")
    cache = make_cache(spec, range(61), 1, 1000, dtype=torch.bfloat16, device="meta")
    assert cache.nbytes() == 1000 * 70_272
    assert cache.nbytes() == 1000 * cache_bytes_per_token(spec.attention, 61)


def test_a_full_cache_takes_no_more() -> None:
    stage, tokens = _stage(SPECS["window"], torch.float32), _tokens()
    cache = stage.make_cache(2, 8)
    stage(tokens[:, :8], cache)
    with pytest.raises(AssertionError, match="fewer positions"):
        stage(tokens[:, 8:9], cache)
