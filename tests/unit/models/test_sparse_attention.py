"""DeepSeek sparse attention: the ops against plain float64, the block against the released code.

Transformers' DeepSeek-V3.2 is met in tests/parity/test_logits_against_transformers.py.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flopwright.kernels.sparse_attention import op
from flopwright.kernels.sparse_attention.reference import NONE
from flopwright.models.attention_dsa.module import SparseLatentAttention
from flopwright.models.attention_mla.module import LatentAttention
from flopwright.models.rotary import RotaryTable
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.spec.attention import Indexer, MlaAttention, Rope
from flopwright.spec.cache import sequence_cache_bytes
from flopwright.spec.flops import attention_flops_per_token
from flopwright.spec.load import load_model
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params, parameters

WIDE = torch.float64
CPU = torch.device("cpu")
INDEX = Indexer(num_heads=8, head_dim=6, top_k=5)
MLA = MlaAttention(
    num_heads=3, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5, indexer=INDEX,
)  # fmt: skip


def _drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


def _mask(indices: Tensor, keys: int) -> Tensor:
    """Returns [B, S, T] True where a query's choice has the position."""
    seen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool)
    for b, s in itertools.product(*map(range, indices.shape[:2])):
        for t in indices[b, s].tolist():
            if t != NONE:
                seen[b, s, t] = True
    return seen


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (4, 13), (1, 13)])
def test_the_best_of_what_a_query_sees_are_chosen(queries: int, keys: int) -> None:
    q, k, w = _drawn(2, queries, 8, 6), _drawn(2, keys, 6, seed=1), _drawn(2, queries, 8, seed=2)
    chosen = op.select_keys(q, k, w, 5)
    for b, s in itertools.product(range(2), range(queries)):
        own = keys - queries + s
        scores = [
            sum(float(w[b, s, h]) * max(0.0, float(q[b, s, h] @ k[b, t])) for h in range(8))
            for t in range(own + 1)
        ]
        best = sorted(range(own + 1), key=lambda t: (-scores[t], t))[:5]
        found = [t for t in chosen[b, s].tolist() if t != NONE]
        assert found == best
        assert chosen.shape[-1] == min(5, keys)


def test_of_equal_scores_the_earlier_position_goes_first() -> None:
    q, k = torch.zeros(1, 6, 2, 4), torch.ones(1, 6, 4)
    chosen = op.select_keys(q, k, torch.ones(1, 6, 2), 3)
    assert chosen[0, -1].tolist() == [0, 1, 2]
    assert chosen[0, 1].tolist() == [0, 1, NONE]


@pytest.mark.parametrize("seq", [4, 11])
def test_attention_over_chosen_keys_equals_masked_attention(seq: int) -> None:
    q, keys = _drawn(2, seq, 3, 7).requires_grad_(), _drawn(2, seq, 7, seed=1).requires_grad_()
    index_q, index_k, w = _drawn(2, seq, 8, 6), _drawn(2, seq, 6, seed=3), _drawn(2, seq, 8)
    chosen, scale, grad = op.select_keys(index_q, index_k, w, 5), 0.3, _drawn(2, seq, 3, 4, seed=5)
    out, lse = op.selected_attention(q, keys, chosen, 4, scale)
    found = torch.autograd.grad(out, (q, keys), grad)
    scores = torch.einsum("bshd,btd->bhst", q, keys) * scale
    scores = scores.masked_fill(~_mask(chosen, seq).unsqueeze(1), -math.inf)
    expected = torch.einsum("bhst,btv->bshv", scores.softmax(-1), keys[..., :4])
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    for a, b in zip(found, torch.autograd.grad(expected, (q, keys), grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("whole", [True, False])
def test_the_indexers_loss_is_the_divergence_from_what_heads_attend_to(whole: bool) -> None:
    seq, scale = 9, 0.4
    leaves = _drawn(2, seq, 8, 6), _drawn(2, seq, 6, seed=1), _drawn(2, seq, 8, seed=2)
    index_q, index_k, w = (t.requires_grad_() for t in leaves)
    q = _drawn(2, seq, 3, 7, seed=3)
    keys = _drawn(2, seq, 3, 7, seed=4) if whole else _drawn(2, seq, 7, seed=4)
    chosen = None if whole else op.select_keys(index_q, index_k, w, 4)
    seen = torch.ones(seq, seq, dtype=torch.bool).tril().expand(2, seq, seq)
    seen = seen if chosen is None else _mask(chosen, seq)
    scores = torch.einsum("bshd,bthd->bhst" if whole else "bshd,btd->bhst", q, keys) * scale
    scores = scores.masked_fill(~seen.unsqueeze(1), -math.inf)
    value, *_ = op.index_loss(
        index_q, index_k, w, q, keys, scores.logsumexp(-1), chosen, scale
    )  # fmt: skip
    found = torch.autograd.grad(2.0 * value, (index_q, index_k, w))
    p = scores.softmax(-1).mean(1)
    own = torch.einsum("bshw,btw->bsht", index_q, index_k).relu()
    share = torch.einsum("bsht,bsh->bst", own, w).masked_fill(~seen, -math.inf).log_softmax(-1)
    terms = torch.where(seen, p * (p.clamp(min=1e-300).log() - share), 0.0)
    expected = terms.sum(-1).mean()
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-13)
    exact = torch.autograd.grad(2.0 * expected, (index_q, index_k, w))
    for a, b in zip(found, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def test_products_by_head_and_their_gradients() -> None:
    x, weight = _drawn(2, 5, 3, 4).requires_grad_(), _drawn(3, 6, 4, seed=1).requires_grad_()
    grad = _drawn(2, 5, 3, 6, seed=2)
    expected = torch.einsum("bshi,hoi->bsho", x, weight)
    found = op.head_linear(x, weight)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    for a, b in zip(
        torch.autograd.grad(found, (x, weight), grad),
        torch.autograd.grad(expected, (x, weight), grad),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _blocks(top_k: int) -> tuple[SparseLatentAttention, LatentAttention]:
    """Returns a block and latent attention with the same weights."""
    spec = MLA.model_copy(update={"indexer": INDEX.model_copy(update={"top_k": top_k})})
    plain = MLA.model_copy(update={"indexer": None})
    rotary = RotaryTable(spec.rope, spec.qk_rope_head_dim)
    sparse = SparseLatentAttention(spec, 24, 1e-6, rotary, dtype=WIDE, device=CPU)
    dense = LatentAttention(plain, 24, 1e-6, rotary, dtype=WIDE, device=CPU)
    with torch.no_grad():
        for i, (name, p) in enumerate(sparse.named_parameters()):
            p.copy_(_drawn(*p.shape, seed=i) / math.sqrt(p.shape[-1]) + (p.ndim == 1))
            if name in dict(dense.named_parameters()):
                dense.get_parameter(name).copy_(p)
    return sparse, dense


def _gradients(block: torch.nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    block.zero_grad()
    x = x.clone().requires_grad_()
    out = block(x)
    out.backward(_drawn(*out.shape, seed=9))
    grads = {n: p.grad for n, p in block.named_parameters() if p.grad is not None}
    assert x.grad is not None
    return out.detach(), grads | {"x": x.grad}


@pytest.mark.parametrize("top_k", [11, 12, 100])
def test_with_nothing_to_leave_out_it_is_latent_attention_bit_for_bit(top_k: int) -> None:
    sparse, dense = _blocks(top_k)
    x = _drawn(2, 11, 24, seed=50)
    out, grads = _gradients(sparse, x)
    exact, exact_grads = _gradients(dense, x)
    assert torch.equal(out, exact)
    for name, grad in exact_grads.items():
        assert torch.equal(grads[name], grad), name
    assert all(grads[n].abs().max() > 0 for n in grads if n.startswith("indexer."))


def _turn(x: Tensor, angles: Tensor, neighbours: bool) -> Tensor:
    """Rotates [B, S, ..., W] by angles [S, W / 2]."""
    shape = (1, x.shape[1], *[1] * (x.ndim - 3), angles.shape[-1])
    cos, sin = angles.cos().view(shape), angles.sin().view(shape)
    if neighbours:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _released(w: dict[str, Tensor], x: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Returns (result, indexer's loss) by the formulas of the released inference code.

    Keys and values of all heads, and a mask of what the indexer leaves out.
    """
    b, s, _ = x.shape
    angles = torch.arange(s, dtype=WIDE).outer(10_000.0 ** (-torch.arange(0, 4, 2).to(WIDE) / 4))
    latent = _norm(x @ w["q_a_proj.weight"].t(), w["q_a_layernorm.weight"])
    q = (latent @ w["q_b_proj.weight"].t()).view(b, s, 3, 10)
    q = torch.cat((q[..., :6], _turn(q[..., 6:], angles, True)), -1)
    down = x @ w["kv_a_proj_with_mqa.weight"].t()
    kv = _norm(down[..., :10], w["kv_a_layernorm.weight"]) @ w["kv_b_proj.weight"].t()
    k, v = kv.view(b, s, 3, 11).split((6, 5), -1)
    shared = _turn(down[..., 10:], angles, True).unsqueeze(2).expand(-1, -1, 3, -1)
    scores = torch.einsum("bshd,bthd->bhst", q, torch.cat((k, shared), -1)) / math.sqrt(10)
    state, fixed = x.detach(), latent.detach()
    iq = (fixed @ w["indexer.wq_b.weight"].t()).view(b, s, 8, 6)
    iq = torch.cat((_turn(iq[..., :4], angles, False), iq[..., 4:]), -1)
    ik = torch.nn.functional.layer_norm(
        state @ w["indexer.wk.weight"].t(), (6,), w["indexer.k_norm.weight"],
        w["indexer.k_norm.bias"], 1e-6,
    )  # fmt: skip
    ik = torch.cat((_turn(ik[..., :4], angles, False), ik[..., 4:]), -1)
    weights = state @ w["indexer.weights_proj.weight"].t() * 8**-0.5 * 6**-0.5
    index = torch.einsum("bshw,btw->bsht", iq, ik).relu()
    index = torch.einsum("bsht,bsh->bst", index, weights)
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    index = index.masked_fill(hidden, -math.inf)
    best = index.topk(min(top_k, s), -1).indices
    left_out = torch.ones(b, s, s, dtype=torch.bool).scatter_(-1, best, False) | hidden
    p = scores.masked_fill(left_out.unsqueeze(1), -math.inf).softmax(-1)
    out = torch.einsum("bhst,bthv->bshv", p, v).flatten(2) @ w["o_proj.weight"].t()
    share = index.masked_fill(left_out, -math.inf).log_softmax(-1)
    mean = p.detach().mean(1)
    terms = torch.where(left_out, 0.0, mean * (mean.clamp(min=1e-300).log() - share))
    return out, terms.sum(-1).mean()


@pytest.mark.parametrize("top_k", [1, 5, 10])
def test_block_equals_the_released_codes_formulas(top_k: int) -> None:
    sparse, _ = _blocks(top_k)
    x = _drawn(2, 11, 24, seed=50)
    found, grads = _gradients(sparse, x)
    w = {n: p.detach().clone().requires_grad_() for n, p in sparse.named_parameters()}
    leaf = x.clone().requires_grad_()
    out, loss_of = _released(w, leaf, top_k)
    torch.testing.assert_close(found, out.detach(), rtol=1e-11, atol=1e-12)
    out.backward(_drawn(*out.shape, seed=9))
    exact = {n: p.grad for n, p in w.items() if p.grad is not None} | {"x": leaf.grad}
    assert not any(n.startswith("indexer.") for n in exact)
    names = [n for n in w if n.startswith("indexer.")]
    for n, g in zip(names, torch.autograd.grad(loss_of, [w[n] for n in names]), strict=True):
        exact[n] = g
    assert grads.keys() == exact.keys()
    for n, g in exact.items():
        torch.testing.assert_close(grads[n], g, rtol=1e-8, atol=1e-12, msg=n)


def test_only_the_indexer_feels_its_loss() -> None:
    found = []
    for weight in (1.0, 3.0):
        sparse, _ = _blocks(5)
        index = INDEX.model_copy(update={"loss_weight": weight})
        sparse.spec = MLA.model_copy(update={"indexer": index})
        found.append(_gradients(sparse, _drawn(2, 11, 24, seed=50))[1])
    once, thrice = found
    for name, grad in once.items():
        if name.startswith("indexer."):
            torch.testing.assert_close(thrice[name], 3 * grad, rtol=1e-12, atol=0)
        else:
            assert torch.equal(thrice[name], grad), name


def _stage(spec: ModelSpec) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=WIDE)
    init_weights_(stage, spec, 3)
    return stage


def _mini(**index: Any) -> ModelSpec:
    data = load_model("deepseek_v32_mini").to_data()
    data["attention"]["indexer"] |= index
    return ModelSpec.model_validate(data)


@pytest.mark.parametrize("absorb", [True, False])
def test_generation_from_the_cache_equals_the_whole_sequence(absorb: bool) -> None:
    spec = _mini(top_k=12)
    stage = _stage(spec).eval()
    for m in stage.modules():
        if isinstance(m, LatentAttention):
            m.absorb = absorb
    tokens = torch.randint(spec.vocab_size, (2, 41), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole, cache = stage(tokens), stage.make_cache(2, 64)
        parts = [stage(tokens[:, :8], cache), stage(tokens[:, 8:30], cache)]
        parts += [stage(tokens[:, i : i + 1], cache) for i in range(30, 41)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-11)
    assert cache.nbytes() == 2 * 64 * spec.num_layers * 8 * (64 + 16 + 32)


@pytest.mark.slow
def test_a_small_model_trains_and_its_indexers_come_nearer() -> None:
    spec = _mini(top_k=12)
    torch.manual_seed(0)
    stage = _stage(spec)
    tokens = torch.randint(40, (4, 33), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(stage.parameters(), lr=2e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        value = loss(stage(tokens[:, :-1]), tokens[:, 1:])
        value.backward()
        optimizer.step()
        losses.append(value.item())
    assert losses[-1] < losses[0] - 1.0
    assert all(p.grad is not None for p in stage.parameters())


def test_deepseek_v32_has_the_published_parameters() -> None:
    spec, plain = load_model("deepseek_v32"), load_model("deepseek_v3")
    trained = sum(p.numel for p in parameters(spec) if p.trainable)
    assert trained == 671_877_929_216
    index = 61 * (64 * 128 * 1536 + 128 * 7168 + 2 * 128 + 64 * 7168)
    assert num_params(spec) - num_params(plain) == index
    # Latent and rotary key, and an index key: 704 numbers a token and layer.
    assert sequence_cache_bytes(spec, 1) == 61 * 704 * 2
    seen = 2 * 2048 - 2048**2 / 131072
    products = 3 * seen * 128 * 320 + 131072 * 64 * 128
    assert attention_flops_per_token(spec, 131072) == pytest.approx(61 * products)


def test_everything_wrong_with_an_indexer_is_said_at_once() -> None:
    data = MLA.to_data() | {"q_lora_rank": None}
    data["indexer"] |= {"head_dim": 2}
    with pytest.raises(ValueError, match=r"q_lora_rank.*indexer\.head_dim \(2\)"):
        MlaAttention.model_validate(data)


def test_a_shrunk_model_keeps_its_indexer() -> None:
    spec = load_model("deepseek_v32").shrunk(hidden_size=128, num_layers=4)
    attn = spec.attention
    assert isinstance(attn, MlaAttention)
    assert attn.indexer is not None
    assert attn.indexer.head_dim >= attn.qk_rope_head_dim
    assert attn.indexer.top_k == round(2048 * 1024 / 163840)
    stage = build_stage(spec, range(-1, 5), device="meta")
    held = {n: tuple(t.shape) for n, t in (*stage.named_parameters(), *stage.named_buffers())}
    assert held == {p.name: p.shape for p in parameters(spec)}


def test_keys_without_positions_are_chosen_too() -> None:
    spec = MLA.model_copy(update={"rope": None})
    rotary = RotaryTable(None, spec.qk_rope_head_dim)
    block = SparseLatentAttention(spec, 24, 1e-6, rotary, dtype=WIDE, device=CPU)
    with torch.no_grad():
        for i, p in enumerate(block.parameters()):
            p.copy_(_drawn(*p.shape, seed=i) / math.sqrt(p.shape[-1]) + (p.ndim == 1))
    x = _drawn(1, 8, 24, seed=50)
    turned = x[:, [1, 0, *range(2, 8)]]  # what comes before may change places
    torch.testing.assert_close(block(x)[:, 7], block(turned)[:, 7], rtol=1e-11, atol=1e-12)
    assert Rope().theta == 10_000
