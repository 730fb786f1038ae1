"""Stages: names, partition, expert slices, first weights, and a second model in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention, MlaAttention, Mlp, ModelSpec, Moe, Rope
from flopwright.spec.parameters import num_params, parameters

MINI = load_model("kimi_k2_mini")
SMALL = MINI.model_copy(update={"num_layers": 2, "hidden_size": 48, "vocab_size": 97})
LLAMA = ModelSpec(
    name="small_llama", hidden_size=32, num_layers=2, vocab_size=50, tied_embeddings=True,
    attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True, bias=True),
    mlp=Mlp(intermediate_size=64),
)  # fmt: skip
WINDOWED = LLAMA.model_copy(
    update={
        "name": "small_windowed",
        "attention": GqaAttention(
            num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=5, first_window_layer=1
        ),
    }
)
GPT = ModelSpec(
    name="small_gpt", hidden_size=32, num_layers=1, vocab_size=50, max_seq_len=16,
    positions="learned", norm="layer_norm", norm_eps=1e-5,
    mlp=Mlp(kind="gelu", intermediate_size=64, bias=True),
    attention=GqaAttention(
        num_heads=2, num_kv_heads=2, head_dim=16, rope=None, bias=True, o_bias=True
    ),
)  # fmt: skip


def _whole(spec: ModelSpec, **options: Any) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1), **options)
    if options.get("device") != "meta":
        init_weights_(stage, spec, 7)
    return stage


def _tokens(spec: ModelSpec, batch: int = 2, seq: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(spec.vocab_size, (batch, seq), generator=generator)


@pytest.mark.parametrize(
    "spec", [load_model("kimi_k2"), MINI, LLAMA, WINDOWED, GPT], ids=lambda s: s.name
)
def test_tensors_are_those_of_the_spec(spec: ModelSpec) -> None:
    state = _whole(spec, device="meta", dtype=torch.bfloat16).state_dict()
    assert {n: tuple(t.shape) for n, t in state.items()} == {
        p.name: p.shape for p in parameters(spec)
    }


def test_k2_has_its_published_number_of_weights() -> None:
    state = _whole(load_model("kimi_k2"), device="meta").state_dict()
    assert sum(t.numel() for t in state.values()) == 1_026_408_232_448
    assert sum(t.numel() for t in state.values()) == num_params(load_model("kimi_k2"))


@pytest.mark.parametrize("spec", [SMALL, LLAMA, GPT], ids=lambda s: s.name)
def test_two_stages_equal_one(spec: ModelSpec) -> None:
    tokens = _tokens(spec)
    whole = _whole(spec)
    cut = spec.num_layers // 2
    first = build_stage(spec, range(-1, cut))
    second = build_stage(spec, range(cut, spec.num_layers + 1))
    for stage in (first, second):
        init_weights_(stage, spec, 7)
    x = first(tokens)
    boundary = x.detach().requires_grad_()
    value = loss(second(boundary), tokens)
    value.backward()
    x.backward(boundary.grad)
    expected = loss(whole(tokens), tokens)
    expected.backward()
    assert torch.equal(value, expected)
    grads = {n: p.grad for s in (first, second) for n, p in s.named_parameters()}
    for name, p in whole.named_parameters():
        if spec.tied_embeddings and name == "model.embed_tokens.weight":
            continue  # the two copies' gradients are summed by whoever runs the stages
        assert torch.equal(p.grad, grads[name]), name


def test_tied_copies_start_equal_and_gradients_add() -> None:
    whole = _whole(LLAMA)
    assert whole.lm_head is not None
    assert whole.model.embed_tokens is not None
    assert whole.lm_head.weight is whole.model.embed_tokens.weight
    head = build_stage(LLAMA, [LLAMA.num_layers])
    init_weights_(head, LLAMA, 7)
    assert head.lm_head is not None
    assert torch.equal(head.lm_head.weight, whole.lm_head.weight)


def test_expert_slices_hold_the_right_experts() -> None:
    whole = _whole(SMALL).state_dict()
    for rank in range(4):
        part = build_stage(SMALL, range(-1, 3), ep_rank=rank, ep_size=4)
        init_weights_(part, SMALL, 7)
        for name, tensor in part.state_dict().items():
            full = whole[name]
            if ".experts." in name:
                full = full[rank * 4 : (rank + 1) * 4]
            assert torch.equal(tensor, full), name


def test_first_weights_depend_on_seed_and_not_on_dtype() -> None:
    a, b = _whole(SMALL), build_stage(SMALL, range(-1, 3), dtype=torch.float64)
    init_weights_(b, SMALL, 7)
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p.double(), q), name
    init_weights_(b, SMALL, 8)
    assert not torch.equal(a.lm_head.weight.double(), b.lm_head.weight)  # type: ignore[union-attr]


def test_first_loss_is_that_of_guessing() -> None:
    tokens = _tokens(MINI, 2, 64)
    value = loss(_whole(MINI)(tokens), tokens)
    assert value.item() == pytest.approx(torch.tensor(MINI.vocab_size).log().item(), rel=0.03)


def _rotate(x: Tensor, theta: float, interleaved: bool) -> Tensor:
    """Turns [B, S, H, D] by complex exponentials."""
    width = x.shape[-1]
    exponent = torch.arange(0, width, 2, dtype=torch.float64) / width
    angle = torch.arange(x.shape[1])[:, None] * theta**-exponent
    turn = torch.polar(torch.ones_like(angle, dtype=x.dtype), angle.to(x.dtype))[:, None]
    if interleaved:
        pairs = torch.complex(x[..., 0::2], x[..., 1::2]) * turn
        return torch.stack((pairs.real, pairs.imag), -1).flatten(-2)
    pairs = torch.complex(x[..., : width // 2], x[..., width // 2 :]) * turn
    return torch.cat((pairs.real, pairs.imag), -1)


class Plain:
    """The same models written again from the papers, over a dict of weights."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor]) -> None:
        self.spec, self.w = spec, weights

    def norm(self, x: Tensor, name: str) -> Tensor:
        if f"{name}.bias" in self.w:
            weight, bias = self.w[f"{name}.weight"], self.w[f"{name}.bias"]
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.spec.norm_eps)
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.spec.norm_eps)

    def lin(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        back = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
        window = self.spec.sliding_window(int(name.split(".")[2])) or 10**9
        seen = (back >= 0) & (back < window)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.lin(out.transpose(1, 2).flatten(2), f"{name}.o_proj")

    def mla(self, x: Tensor, name: str, a: MlaAttention) -> Tensor:
        shape = (*x.shape[:2], a.num_heads, -1)
        q = self.lin(self.norm(self.lin(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm"), f"{name}.q_b_proj")  # fmt: skip  # noqa: E501
        q = q.reshape(shape)
        q = torch.cat((q[..., : a.qk_nope_head_dim], _rotate(q[..., a.qk_nope_head_dim :], a.rope.theta, True)), -1)  # fmt: skip  # noqa: E501
        down = self.lin(x, f"{name}.kv_a_proj_with_mqa")
        kv = self.lin(
            self.norm(down[..., : a.kv_lora_rank], f"{name}.kv_a_layernorm"), f"{name}.kv_b_proj"
        ).reshape(shape)
        key = _rotate(down[..., None, a.kv_lora_rank :], a.rope.theta, True)
        k = torch.cat((kv[..., : a.qk_nope_head_dim], key.expand(*shape[:3], -1)), -1)
        return self.attend(q, k, kv[..., a.qk_nope_head_dim :], name)

    def gqa(self, x: Tensor, name: str, a: GqaAttention) -> Tensor:
        q, k, v = (
            self.lin(x, f"{name}.{p}_proj").reshape(*x.shape[:2], -1, a.head_dim) for p in "qkv"
        )
        if a.qk_norm:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        if a.rope is not None:
            q, k = _rotate(q, a.rope.theta, False), _rotate(k, a.rope.theta, False)
        return self.attend(q, k, v, name)

    def dense(self, x: Tensor, name: str) -> Tensor:
        up = self.lin(x, f"{name}.up_proj")
        if self.spec.mlp.kind == "gelu":
            return self.lin(F.gelu(up, approximate="tanh"), f"{name}.down_proj")
        return self.lin(F.silu(self.lin(x, f"{name}.gate_proj")) * up, f"{name}.down_proj")

    def experts(self, x: Tensor, name: str, moe: Moe) -> Tensor:
        out = self.dense(x, f"{name}.shared_experts")
        score = torch.sigmoid(self.lin(x, f"{name}.gate"))
        chosen = torch.topk(score, moe.top_k).indices
        mask = torch.zeros_like(score).scatter(-1, chosen, 1.0)
        weight = score * mask / (score * mask).sum(-1, keepdim=True) * moe.routed_scaling_factor
        for e in range(moe.num_experts):  # every expert sees every token
            gate, up = F.linear(x, self.w[f"{name}.experts.gate_up_proj"][e]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.w[f"{name}.experts.down_proj"][e])
            out = out + weight[..., e : e + 1] * y
        return out

    def __call__(self, tokens: Tensor) -> Tensor:
        spec = self.spec
        x = self.w["model.embed_tokens.weight"][tokens]
        if spec.positions == "learned":
            x = x + self.w["model.embed_positions.weight"][: tokens.shape[1]]
        for i in range(spec.num_layers):
            name = f"model.layers.{i}"
            state = self.norm(x, f"{name}.input_layernorm")
            a = spec.attention
            attend = self.mla if isinstance(a, MlaAttention) else self.gqa
            x = x + attend(state, f"{name}.self_attn", a)  # type: ignore[arg-type]
            state = self.norm(x, f"{name}.post_attention_layernorm")
            if spec.is_moe_layer(i):
                assert spec.moe is not None
                x = x + self.experts(state, f"{name}.mlp", spec.moe)
            else:
                x = x + self.dense(state, f"{name}.mlp")
        return self.lin(self.norm(x, "model.norm"), "lm_head")


@pytest.mark.parametrize("spec", [SMALL, LLAMA, WINDOWED, GPT], ids=lambda s: s.name)
def test_model_equals_one_written_in_plain_torch(spec: ModelSpec) -> None:
    stage, tokens = _whole(spec, dtype=torch.float64), _tokens(spec)
    with torch.no_grad():  # no symmetry of fresh weights may hide a mistake
        for i, p in enumerate(stage.parameters()):
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) * 0.1)
    weights = {n: p.detach().clone().requires_grad_() for n, p in stage.named_parameters()}
    if spec.tied_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    logits, expected = stage(tokens), Plain(spec, weights)(tokens)
    torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-10)
    targets = tokens.roll(-1, 1)
    loss(logits, targets).backward()
    F.cross_entropy(expected.flatten(0, 1), targets.flatten()).backward()
    for name, p in stage.named_parameters():
        torch.testing.assert_close(p.grad, weights[name].grad, rtol=1e-8, atol=1e-11, msg=name)


def test_bf16_model_keeps_angles_and_bias_wide() -> None:
    stage = _whole(SMALL).to(torch.bfloat16)
    bias = stage.state_dict()["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32
    tokens = _tokens(SMALL, 1, 64)
    exact = loss(_whole(SMALL, dtype=torch.float64)(tokens), tokens)
    assert loss(stage(tokens), tokens).item() == pytest.approx(exact.item(), rel=0.01)


def test_yarn_changes_long_positions_only() -> None:
    mla = SMALL.attention
    assert isinstance(mla, MlaAttention)
    k2 = load_model("kimi_k2").attention
    assert isinstance(k2, MlaAttention)
    scaled = SMALL.model_copy(
        update={
            "attention": mla.model_copy(
                update={"rope": Rope(theta=50_000, scaling=k2.rope.scaling)}
            )
        }
    )
    a, b = (_whole(s, dtype=torch.float64) for s in (SMALL, scaled))
    x = torch.randn(1, 1, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # One token attends to itself whatever the frequencies and the softmax scale are.
    torch.testing.assert_close(a.blocks()[0].self_attn(x), b.blocks()[0].self_attn(x))
    x = torch.randn(1, 8, 48, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(a.blocks()[0].self_attn(x), b.blocks()[0].self_attn(x))
