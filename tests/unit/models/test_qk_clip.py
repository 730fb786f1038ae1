"""QK-Clip: a clipped head's recomputed maximum is tau, everything else keeps its bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flopwright.errors import InputError
from flopwright.kernels.attention.max_logit import max_logit
from flopwright.models.optim.qk_clip.cost import clipped_weights, record_cost, step_cost
from flopwright.models.optim.qk_clip.module import (
    RecordMaxLogits,
    clip_,
    row_factors,
    scale_rows_,
)
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import Collective, Phase, ShardShape
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention, MlaAttention, Mlp, ModelSpec

MLA = MlaAttention(
    num_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip
MHA = GqaAttention(num_heads=4, num_kv_heads=4, head_dim=6, bias=True)
ATTENTIONS = {
    "mla": MLA,
    "mla_without_q_lora": MLA.model_copy(update={"q_lora_rank": None}),
    "mha": MHA,
    "mha_without_rope": MHA.model_copy(update={"rope": None, "bias": False}),
    "gqa": MHA.model_copy(update={"num_kv_heads": 2}),
}


def _spec(attention: Any) -> ModelSpec:
    return ModelSpec(
        name="small", hidden_size=24, num_layers=2, vocab_size=41, attention=attention,
        mlp=Mlp(intermediate_size=36),
    )  # fmt: skip


def _stage(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=dtype)
    init_weights_(stage, spec, 0)
    with torch.no_grad():
        for name, p in stage.named_parameters():
            if "self_attn" in name and p.ndim == 2:
                p.mul_(5)  # so that logits differ between heads
            elif name.endswith(".bias"):
                p.normal_(generator=torch.Generator().manual_seed(1))
    return stage


def _tokens(spec: ModelSpec, batch: int = 3, seq: int = 17) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(spec.vocab_size, (batch, seq), generator=generator)


def _record(stage: Stage, *batches: Tensor) -> dict[int, Tensor]:
    with torch.no_grad(), RecordMaxLogits(stage) as recorded:
        for tokens in batches:
            stage(tokens)
    return recorded.maxima


def _by_hand(q: Tensor, k: Tensor, scale: float, window: int) -> list[float]:
    best = []
    for h in range(q.shape[2]):
        g = h * k.shape[2] // q.shape[2]
        values = [
            scale * float(q[b, i, h] @ k[b, j, g])
            for b in range(q.shape[0])
            for i in range(q.shape[1])
            for j in range(max(0, i - window + 1) if window else 0, i + 1)
        ]
        best.append(max(values))
    return best


@pytest.mark.parametrize("window", [0, 1, 4, 100])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_maximum_of_each_head_equals_looking_at_every_pair(
    groups: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flopwright.kernels.attention.max_logit._BLOCK_ROWS", 5)
    generator = torch.Generator().manual_seed(groups)
    q = torch.randn(2, 13, 4, 3, dtype=torch.float64, generator=generator)
    k = torch.randn(2, 13, groups, 3, dtype=torch.float64, generator=generator)
    expected = _by_hand(q, k, 0.7, window)
    assert max_logit(q, k, 0.7, window).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_clipped_heads_reach_tau_and_others_keep_their_bits(name: str) -> None:
    spec = _spec(ATTENTIONS[name])
    stage, tokens = _stage(spec), _tokens(spec)
    # Layer 0 alone, since its clipped output changes what layer 1 sees.
    before = _record(stage, tokens)[0]
    kept = {n: p.clone() for n, p in stage.named_parameters()}
    tau = before.sort().values[1:3].mean().item()  # two of the four heads exceed it
    over = before > tau
    clip_(stage, {0: before}, tau)
    after = _record(stage, tokens)[0]
    torch.testing.assert_close(after[over], torch.full_like(after[over], tau), rtol=1e-6, atol=0)
    assert torch.equal(after[~over], before[~over])
    rows = row_factors(stage, {0: before}, tau)
    for n, p in stage.named_parameters():
        untouched = rows.get(n, torch.ones(len(p))) == 1
        assert torch.equal(p[untouched], kept[n][untouched]), n
        assert not untouched.all() or torch.equal(p, kept[n])
    touched = {n.split("self_attn.")[1].split(".")[0] for n in rows}
    expected = {
        "mla": {"q_b_proj", "kv_b_proj"},
        "mla_without_q_lora": {"q_proj", "kv_b_proj"},
        "gqa": {"q_proj"},
    }
    assert touched == expected.get(name, {"q_proj", "k_proj"})


def test_factors_of_mla_rows() -> None:
    """Square roots on the position-free rows, gamma on rotary queries; values untouched."""
    stage = _stage(_spec(MLA))
    maxima = {1: torch.tensor([50.0, 400.0, -3.0, 100.0], dtype=torch.float64)}
    rows = row_factors(stage, maxima)
    prefix = "model.layers.1.self_attn."
    query = rows[prefix + "q_b_proj.weight"].view(4, 10)
    key = rows[prefix + "kv_b_proj.weight"].view(4, 11)
    assert query[1].tolist() == [0.5] * 6 + [0.25] * 4
    assert key[1].tolist() == [0.5] * 6 + [1.0] * 5
    for head in (0, 2, 3):  # below, negative, at the limit
        assert (query[head] == 1).all()
        assert (key[head] == 1).all()


def test_alpha_splits_between_queries_and_keys() -> None:
    stage = _stage(_spec(MHA))
    rows = row_factors(stage, {0: torch.tensor([400.0, 1.0, 1.0, 1.0])}, 100.0, 0.25)
    prefix = "model.layers.0.self_attn."
    assert rows[prefix + "q_proj.bias"][0].item() == pytest.approx(0.25**0.25)
    assert rows[prefix + "k_proj.weight"][0].item() == pytest.approx(0.25**0.75)
    assert prefix + "v_proj.weight" not in rows


def test_maxima_are_those_of_all_micro_batches_forward_and_recomputed() -> None:
    spec = _spec(MLA)
    stage, a, b = _stage(spec), _tokens(spec), _tokens(spec).flip(0, 1)
    together = _record(stage, a, b)
    for layer in (0, 1):
        alone = torch.maximum(_record(stage, a)[layer], _record(stage, b)[layer])
        assert torch.equal(together[layer], alone)
    with RecordMaxLogits(stage) as recorded:
        loss(stage(a), a).backward()
    assert torch.equal(recorded.maxima[1], _record(stage, a)[1])
    assert not any(layer.self_attn._forward_hooks for layer in stage.blocks())  # all removed


def test_training_with_the_clip_keeps_logits_under_the_limit() -> None:
    spec = _spec(MLA)
    stage, tokens = _stage(spec), _tokens(spec)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    tau, seen = 2.0, []
    for _ in range(5):
        with RecordMaxLogits(stage) as recorded:
            loss(stage(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(max(m.max().item() for m in recorded.maxima.values()))
        clip_(stage, recorded.maxima, tau)
    assert seen[0] > 1.5 * tau
    assert max(seen[3:]) < 1.1 * tau  # the update between clip and forward may add a little


def test_bf16_rows_are_rounded_once_and_untouched_ones_exact() -> None:
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    factor = torch.tensor([1.0, 0.7, 1.0, 0.3, 1.0, 1.0])
    expected = (weight.float() * factor.unsqueeze(1)).to(torch.bfloat16)
    scaled = weight.clone()
    scale_rows_(scaled, factor)
    assert torch.equal(scaled, expected)
    assert torch.equal(scaled[[0, 2, 4, 5]], weight[[0, 2, 4, 5]])


def test_normalised_queries_are_refused() -> None:
    stage = _stage(_spec(MHA.model_copy(update={"qk_norm": True})))
    with pytest.raises(InputError, match="qk_norm"):
        row_factors(stage, {0: torch.full((4,), 200.0)})


def test_message_is_one_fp32_a_head_and_layer() -> None:
    k2 = load_model("kimi_k2")
    comms = step_cost(k2, [61, 4], tp=[1, 2], num_candidates=2).comms
    assert comms.collective.tolist() == [Collective.ALL_REDUCE]
    assert (comms.group, comms.phase.tolist()) == (("dp",), [Phase.STEP])
    np.testing.assert_array_equal(comms.bytes * comms.count, [[61 * 64 * 4, 2 * 64 * 4]])


@pytest.mark.parametrize("name", ATTENTIONS)
def test_priced_weights_are_those_that_factors_can_reach(name: str) -> None:
    spec = _spec(ATTENTIONS[name])
    stage = _stage(spec)
    rows = row_factors(stage, {0: torch.full((4,), 1e6, dtype=torch.float64)})
    weights = {n: p for n, p in stage.named_parameters() if n in rows and p.ndim == 2}
    reached = sum(int((rows[n] != 1).sum()) * p.shape[1] for n, p in weights.items())
    assert clipped_weights(spec) == reached
    ops = step_cost(spec, 2, clipped=0.5).ops
    assert ops.read_bytes.item() == reached * 2
    assert step_cost(spec, 2, clipped=0.0).ops.written_bytes.item() == 0


@pytest.mark.parametrize("window", [None, 3])
def test_priced_flops_of_recording_are_its_products(
    window: int | None, flop_counter: Callable[[], Any]
) -> None:
    """Counted on one query row at a time: only pairs in sight are priced."""
    spec = _spec(MLA)
    q = torch.randn(2, 9, 4, spec.attention.qk_head_dim)
    with flop_counter() as counter:
        for i in range(9):
            seen = slice(max(0, i - window + 1) if window else 0, i + 1)
            q[:, i : i + 1].transpose(1, 2) @ q[:, seen].permute(0, 2, 3, 1)
    shape = ShardShape(micro_batch_size=2, seq_len=9)
    assert record_cost(spec, shape, window=window).ops.total_flops().item() == counter.flops
    halved = record_cost(spec, ShardShape(micro_batch_size=2, seq_len=9, tp=2), window=window)
    assert halved.ops.total_flops().item() == counter.flops / 2
    assert record_cost(spec, shape, kernel="fused").ops.total_flops().item() == 0


def test_blocks_that_all_queries_see_and_evaluation() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 5, 4, 8), torch.randn(2, 7, 2, 8)
    scores = torch.einsum("bshd,bthd->hbst", q, k.repeat_interleave(2, 2)) * 0.3
    assert torch.allclose(max_logit(q, k, 0.3, causal=False), scores.amax((1, 2, 3)))
    spec = _spec(MLA)
    stage, tokens = _stage(spec), _tokens(spec)
    with RecordMaxLogits(stage) as recorded:
        stage.eval()
        stage(tokens)
        assert not recorded.maxima  # what is only evaluated belongs to no step
        stage.train()
        stage(tokens)
    assert set(recorded.maxima) == {0, 1}
