"""EAGLE-3-style draft heads: their start, their attention, the loss, training, and the cost."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flopwright.kernels.attention.chained import chained_attention
from flopwright.models.draft.cost import TARGET, draft_cost, draft_params
from flopwright.models.draft.depths import draft_depths
from flopwright.models.draft.module import (
    DraftHead,
    accepted,
    draft_layer,
    tokens_a_verification,
)
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import Phase, ShardShape
from flopwright.spec.attention import GqaAttention, MlaAttention
from flopwright.spec.load import load_model
from flopwright.spec.model import Mlp, ModelSpec

GQA = GqaAttention(num_heads=4, num_kv_heads=2, head_dim=6)
MLA = MlaAttention(
    num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip


def _spec(**changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small", "hidden_size": 24, "num_layers": 4, "vocab_size": 41, "attention": GQA,
        "mlp": Mlp(intermediate_size=36),
    }  # fmt: skip
    return ModelSpec(**(data | changes))


SPECS = {
    "gqa": _spec(attention=GQA.model_copy(update={"qk_norm": True})),
    "mla": _spec(attention=MLA.model_copy(update={"output_gate": True})),
    "residuals": _spec(attention=MLA.model_copy(update={"rope": None}), attn_res_block=1),
}


def _stage(spec: ModelSpec, dtype: torch.dtype = torch.float64, layers: int = 0) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1 + layers), dtype=dtype)
    init_weights_(stage, spec, 3)
    with torch.no_grad():
        for i, p in enumerate(stage.parameters()):
            drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            p.add_(0.3 * drawn.to(dtype) / p.shape[-1] ** 0.5)
    return stage


def _head(name: str, dtype: torch.dtype = torch.float64) -> DraftHead:
    stage = _stage(SPECS[name], dtype)
    return DraftHead(stage, draft_layer(stage.spec, 1, next(stage.parameters())))


def _tokens(rows: int = 2, seq: int = 12, seed: int = 1) -> Tensor:
    return torch.randint(41, (rows, seq), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_at_first_it_drafts_what_the_prediction_module_predicts(attention: str) -> None:
    spec = SPECS[attention].model_copy(update={"mtp_layers": 1})
    stage = _stage(spec, layers=1).eval()
    (module,) = stage.predictors()
    head, tokens = DraftHead(stage, copy.deepcopy(module)).eval(), _tokens()
    with torch.no_grad():
        ((draft, goal),) = list(head.drafts(tokens, steps=1))
        x, last = stage.features(tokens, ())
        assert not x
        assert stage.model.embed_tokens is not None
        expected = module.predict(last, tokens.roll(-1, 1), stage.model.embed_tokens)
    torch.testing.assert_close(draft, expected[:, :-1], rtol=1e-12, atol=1e-12)
    assert torch.equal(goal, last[:, 1:])


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("links", [1, 3])
def test_attention_with_a_chain_equals_a_softmax_over_both(groups: int, links: int) -> None:
    generator, scale, heads = torch.Generator().manual_seed(0), 0.4, 4

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = drawn(2, 7, heads, 5), drawn(2, 7, groups, 5), drawn(2, 7, groups, 3)
    keys, values = drawn(links, 2, 7, groups, 5), drawn(links, 2, 7, groups, 3)
    leaves, grad = (q, k, v, keys, values), torch.randn(2, 7, heads, 3, dtype=torch.float64)
    found, lse = chained_attention(*leaves, scale)
    wide_k, wide_v = (t.repeat_interleave(heads // groups, 2) for t in (k, v))
    own_k, own_v = (t.repeat_interleave(heads // groups, 3) for t in (keys, values))
    scores = torch.einsum("bshd,bthd->bsht", q, wide_k) * scale
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1).view(7, 1, 7)
    scores = scores.masked_fill(hidden, -math.inf)
    both = torch.cat((scores, torch.einsum("bshd,nbshd->bshn", q, own_k) * scale), -1)
    p = both.softmax(-1)
    expected = torch.einsum("bsht,bthv->bshv", p[..., :7], wide_v)
    expected = expected + torch.einsum("bshn,nbshv->bshv", p[..., 7:], own_v)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(lse, both.logsumexp(-1).transpose(1, 2), rtol=1e-11, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(found, leaves, grad),
        torch.autograd.grad(expected, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", SPECS)
def test_unrolled_drafts_are_those_of_decoding_one_by_one(name: str) -> None:
    """Each place by itself: what was verified before it, then its own drafts, token by token."""
    head, tokens, steps = _head(name).eval(), _tokens(1, 9), 3
    with torch.no_grad():
        unrolled = [draft for draft, _ in head.drafts(tokens, steps)]
        depths, _ = head.read(tokens)
        for place in (0, 2, 5):
            found = _decoded(head, tokens, depths, place, steps)
            for step in range(steps):
                torch.testing.assert_close(
                    found[step], unrolled[step][0, place], rtol=1e-10, atol=1e-11
                )


def _decoded(
    head: DraftHead, tokens: Tensor, depths: Tensor, place: int, steps: int
) -> list[Tensor]:
    """Returns the draft states of one place, its sequence grown by a draft each time.

    The sequence of what the layer reads: features up to the place, then its own states.
    """
    layer, embedding = head.layer, head.stage.model.embed_tokens
    assert embedding is not None
    read = head.features(depths[:, : place + 1])
    out = []
    for step in range(1, steps + 1):
        following = tokens[:, 1 : read.shape[1] + 1]
        x = layer.eh_proj(layer.joined(embedding(following), read))
        x = x + layer.self_attn(layer.input_layernorm(x))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = layer.shared_head.norm(x)[:, -1:]
        out.append(last[0, 0])
        read = torch.cat((read, last), 1)
        del step
    return out


@pytest.mark.parametrize("name", SPECS)
def test_acceptance_is_one_less_the_total_variation(name: str) -> None:
    head, tokens = _head(name), _tokens()
    value, shares = head.losses(tokens, 3)
    assert head.stage.lm_head is not None
    weight, exact, nats = head.stage.lm_head.weight, [], []
    for draft, goal in head.drafts(tokens, 3):
        q, p = ((t.flatten(0, 1) @ weight.t()).softmax(-1) for t in (draft, goal))
        exact.append((1 - (p - q).abs().sum(-1) / 2).mean())
        nats.append(-(1 - (p - q).abs().sum(-1) / 2).log().mean())
        own = accepted(*(t.flatten(0, 1) @ weight.t() for t in (draft, goal)))
        torch.testing.assert_close(own.mean(), exact[-1], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(shares, torch.stack(exact).detach(), rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(value, torch.stack(nats).mean(), rtol=1e-10, atol=1e-11)


def test_a_verification_yields_a_geometric_series_of_tokens() -> None:
    shares = torch.full((7,), 0.8, dtype=torch.float64)
    assert float(tokens_a_verification(shares)) == pytest.approx((1 - 0.8**8) / 0.2)
    uneven = torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    assert float(tokens_a_verification(uneven)) == pytest.approx(1 + 0.9 + 0.45 + 0.045)


def test_only_the_head_learns() -> None:
    head = _head("residuals")
    head.losses(_tokens(), 2)[0].backward()
    assert all(p.grad is None for p in head.stage.parameters())
    assert all(p.grad is not None for p in head.parameters())
    names = {n for n, _ in head.named_parameters()}
    assert "features.weight" in names
    assert not any(n.startswith("stage") for n in names)


@pytest.mark.slow
def test_acceptance_rises_as_it_trains() -> None:
    """The frozen model counts up; a new head learns to draft what it would say."""
    spec = SPECS["gqa"]
    stage = build_stage(spec, range(-1, spec.num_layers + 1))
    init_weights_(stage, spec, 0)
    generator = torch.Generator().manual_seed(0)

    def rows() -> Tensor:
        return (torch.randint(41, (8, 1), generator=generator) + torch.arange(17)) % 41

    optimizer = torch.optim.AdamW(stage.parameters(), lr=5e-3)
    for _ in range(60):
        row = rows()
        optimizer.zero_grad()
        loss(stage(row[:, :-1]), row[:, 1:]).backward()
        optimizer.step()
    stage.requires_grad_(False)
    head = DraftHead(stage, draft_layer(spec, 1, next(stage.parameters())))
    optimizer, told = torch.optim.AdamW(head.parameters(), lr=5e-3), []
    for _ in range(50):
        optimizer.zero_grad()
        value, shares = head.losses(rows(), 3)
        value.backward()
        optimizer.step()
        told.append(shares)
    assert (told[0] < 0.2).all()
    assert (told[-1] > 0.7).all()
    assert tokens_a_verification(told[-1]) > 2.5
    assert not torch.equal(head.features.weight[:, :48], torch.zeros(24, 48))


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_flops_and_kept_bytes_are_the_priced_ones(
    name: str, flop_counter: Any, count_saved_bytes: Any
) -> None:
    head, tokens, steps = _head(name, torch.float32).train(), _tokens(), 3
    cost = draft_cost(
        head.stage.spec, ShardShape(micro_batch_size=2, seq_len=12, dtype="fp32"), steps
    )
    with flop_counter() as forward:
        value, _ = head.losses(tokens, steps)
    with flop_counter() as backward:
        value.backward()
    ahead = cost.ops.total_flops(Phase.FORWARD).item()
    assert forward.flops == ahead
    assert backward.flops == cost.ops.total_flops().item() - ahead
    head.stage.requires_grad_(False)
    found, _ = count_saved_bytes(_Both(head), lambda: head.losses(tokens, steps)[0])
    assert cost.lives.bytes.sum() == found


class _Both:
    """The head and its model, as the counter takes a stage."""

    def __init__(self, head: DraftHead) -> None:
        self._parts = (head, head.stage)

    def parameters(self) -> list[Tensor]:
        return [p for part in self._parts for p in part.parameters()]

    def buffers(self) -> list[Tensor]:
        return [b for part in self._parts for b in part.buffers()]

    def constants(self) -> list[Tensor]:
        tables = [p._rotary for p in self._parts[0].modules() if hasattr(p, "_rotary")]
        mine = [t for table in tables if table is not None for t in table.tables()]
        return [*mine, *self._parts[1].constants()]


def test_k3_reads_its_first_fourth_and_last_block() -> None:
    spec = load_model("kimi_k3")
    assert draft_depths(spec.num_layers, spec.attn_res_block) == (11, 47, 92)
    assert draft_depths(32) == (1, 16, 31)
    cost = draft_cost(spec, ShardShape(seq_len=64, dtype="bf16"), 7)
    frozen = [n.startswith(TARGET) for n in cost.ops.name]
    backward = cost.ops.phase[frozen] != Phase.FORWARD
    assert not cost.ops.count[frozen][backward].any()
    # A layer with experts of the latent width, and 3H x H.
    layer = draft_params(spec) - 3 * 7168**2
    routed = 896 * 3 * 3584 * 3072
    assert 0 < layer - routed < 1e9
