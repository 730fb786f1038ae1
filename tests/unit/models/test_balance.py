"""Load balancing: the sign rule of the bias, the sequence-wise loss, replayed routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flopwright.kernels.router import reference
from flopwright.models.moe.balance import balanced, choice_fractions, sequence_balance_loss
from flopwright.models.moe.router import Router
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import ShardShape
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention, Mlp, ModelSpec, Moe

CPU, F64 = torch.device("cpu"), torch.float64
MINI = load_model("kimi_k2_mini")


def _spec(router: str = "sigmoid_noaux_tc", alpha: float = 0.1, **changes: Any) -> ModelSpec:
    moe = {
        "num_experts": 6, "top_k": 2, "expert_intermediate_size": 10, "router": router,
        "sequence_balance_loss": alpha, "num_shared_experts": 1,
    }  # fmt: skip
    return ModelSpec(
        name="small", hidden_size=24, num_layers=2, vocab_size=41, moe=Moe(**(moe | changes)),
        attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=6),
        mlp=Mlp(intermediate_size=36),
    )  # fmt: skip


def _stage(spec: ModelSpec) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=F64)
    init_weights_(stage, spec, 0)
    with torch.no_grad():
        for block in stage.moe_blocks().values():
            block.gate.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(4))
    return stage


def _tokens(spec: ModelSpec, batch: int = 3, seq: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(spec.vocab_size, (batch, seq), generator=generator)


def _loss_by_hand(scores: Tensor, choices: Tensor, sequences: int) -> float:
    """The formula of arXiv 2412.19437, eq. 17-20, term by term."""
    tokens, num_experts = scores.shape
    length, top_k = tokens // sequences, choices.shape[1]
    total = 0.0
    for b in range(sequences):
        mine = range(b * length, (b + 1) * length)
        for i in range(num_experts):
            chosen = sum(i in choices[t].tolist() for t in mine)
            f = num_experts / (top_k * length) * chosen
            p = sum(scores[t, i].item() / scores[t].sum().item() for t in mine) / length
            total += f * p
    return total / sequences


@settings(max_examples=40, deadline=None)
@given(
    sequences=st.integers(1, 3),
    length=st.integers(1, 6),
    top_k=st.integers(1, 3),
    softmax=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_sequence_loss_equals_its_formula(
    sequences: int, length: int, top_k: int, softmax: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sequences * length, 5, dtype=F64, generator=generator)
    scores = reference.score(logits, softmax)
    choices = scores.topk(top_k, -1).indices
    found = sequence_balance_loss(scores, choices, sequences).item()
    assert found == pytest.approx(_loss_by_hand(scores, choices, sequences), rel=1e-12)


def test_balanced_load_costs_one_and_a_single_favourite_costs_most() -> None:
    even = torch.full((8, 4), 0.5, dtype=F64)
    round_robin = torch.tensor([[i % 4, (i + 1) % 4] for i in range(8)])
    assert choice_fractions(round_robin, 4, 2).tolist() == [[1.0] * 4] * 2
    assert sequence_balance_loss(even, round_robin, 2).item() == pytest.approx(1.0)
    favourite = torch.tensor([[1.0, 0.0, 0.0, 0.0]] * 8, dtype=F64)
    assert sequence_balance_loss(favourite, torch.zeros(8, 1, dtype=torch.int64), 1) == 4.0


@pytest.mark.parametrize("softmax", [False, True])
def test_gradient_is_that_of_the_loss_by_differences(softmax: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 5, dtype=F64, generator=generator).requires_grad_()
    choices = logits.detach().topk(2, -1).indices
    weights = torch.randn(6, 2, dtype=F64, generator=generator).requires_grad_()

    def value(x: Tensor) -> Tensor:
        return 0.3 * sequence_balance_loss(reference.score(x, softmax), choices, 2)

    assert torch.autograd.gradcheck(value, (logits,))
    (expected,) = torch.autograd.grad(value(logits), logits)
    out = balanced(weights, logits, choices, sequences=2, softmax=softmax, coefficient=0.3)
    assert torch.equal(out, weights)
    (out * 1.7).sum().backward()
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(weights.grad, torch.full_like(weights, 1.7))


def _total(stage: Stage, tokens: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss with its balance terms written out, scores taken by hooks."""
    spec, terms = stage.spec.moe, []
    assert spec is not None

    def hook(gate: Any, args: Any, output: Any) -> None:
        logits = F.linear(args[0], gate.weight)
        scores = reference.score(logits, spec.router == "softmax")
        terms.append(sequence_balance_loss(scores, output[0], tokens.shape[0]))

    handles = [b.gate.register_forward_hook(hook) for b in stage.moe_blocks().values()]
    value = F.cross_entropy(stage(tokens).flatten(0, 1), targets.flatten())
    for handle in handles:
        handle.remove()
    return value + 0.1 * torch.stack(terms).sum()


@pytest.mark.parametrize("router", ["sigmoid_noaux_tc", "softmax"])
def test_block_adds_the_loss_to_the_gradients(router: str) -> None:
    spec = _spec(router)
    stage, plain = _stage(spec), _stage(_spec(router, alpha=0.0))
    tokens = _tokens(spec)
    targets = tokens.roll(-1, 1)
    value = loss(stage(tokens), targets)
    value.backward()
    assert torch.equal(value, loss(plain(tokens), targets))  # only gradients feel it
    expected = torch.autograd.grad(_total(plain, tokens, targets), list(plain.parameters()))
    for (name, p), grad in zip(stage.named_parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=1e-8, atol=1e-12, msg=name)
    without = torch.autograd.grad(loss(plain(tokens), targets), list(plain.parameters()))
    names = [n for n, _ in plain.named_parameters()]
    gate = names.index("model.layers.0.mlp.gate.weight")
    assert not torch.allclose(without[gate], expected[gate])


def test_micro_batches_average_the_loss() -> None:
    """Two micro-batches, each with its share of one half, pull like one batch of both."""
    spec = _spec()
    whole, parts = _stage(spec), _stage(spec)
    tokens = _tokens(spec, batch=4)
    loss(whole(tokens), tokens).backward()
    for block in parts.moe_blocks().values():
        block.gate.balance_share = 0.5
    for half in tokens.chunk(2):
        (loss(parts(half), half) / 2).backward()
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("router", ["sigmoid_noaux_tc", "softmax"])
def test_priced_bytes_of_the_loss_are_kept(
    router: str, count_saved_bytes: Callable[..., Any]
) -> None:
    spec = _spec(router)
    stage = build_stage(spec, [0], dtype=torch.bfloat16)
    init_weights_(stage, spec, 0)
    x = torch.randn(3, 8, 24, dtype=torch.bfloat16).requires_grad_()
    found, _ = count_saved_bytes(stage, lambda: stage(x))
    shape = ShardShape(micro_batch_size=3, seq_len=8)
    assert layer_cost(spec, 0, shape).lives.bytes.sum() == found
    plain = layer_cost(_spec(router, alpha=0.0), 0, shape).lives.bytes.sum()
    assert found - plain == 3 * 8 * 6 * 4 + 3 * 6 * 4  # fp32 logits, and f of each sequence


def test_evaluation_does_not_pull() -> None:
    stage, tokens = _stage(_spec()).eval(), _tokens(_spec())
    plain = _stage(_spec(alpha=0.0)).eval()
    for s in (stage, plain):
        loss(s(tokens), tokens).backward()
    for p, q in zip(stage.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_the_loss_spreads_tokens() -> None:
    """Gradient steps on the balance loss alone even out a skewed router."""
    moe = Moe(
        num_experts=8, top_k=2, expert_intermediate_size=4, router="softmax",
        sequence_balance_loss=1.0,
    )  # fmt: skip
    router = Router(moe, 16, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator) + 0.5
    with torch.no_grad():
        router.weight.normal_(0, 0.3, generator=generator)

    def worst() -> float:
        return torch.bincount(router(x)[0].flatten(), minlength=8).max().item() / 64

    before = worst()
    optimizer = torch.optim.SGD(router.parameters(), lr=0.5)
    for _ in range(100):
        optimizer.zero_grad()
        router(x, None, 4)[1].mul(0).sum().backward()
        optimizer.step()
    assert before > 1.5
    assert worst() < 1.3


def _biased(rate: float = 0.001, experts: int = 4) -> Router:
    moe = Moe(num_experts=experts, top_k=1, expert_intermediate_size=4, bias_update_rate=rate)
    return Router(moe, 8, dtype=torch.float32, device=CPU)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2**40), min_size=2, max_size=12), st.integers(1, 5))
def test_bias_moves_by_the_exact_sign(loads: list[int], repeats: int) -> None:
    """b_i += rate * sign(mean - load_i) in whole numbers; a load at the mean does not move."""
    router = _biased(0.25, len(loads))  # a rate that binary fractions hold exactly
    bias = router.e_score_correction_bias
    assert bias is not None
    for _ in range(repeats):
        router.update_bias_(torch.tensor(loads))
    total, n = sum(loads), len(loads)
    expected = [0.25 * repeats * ((total > n * x) - (total < n * x)) for x in loads]
    assert bias.tolist() == expected


def test_loads_that_fp32_cannot_tell_apart() -> None:
    router, big = _biased(1.0), 2**25
    router.update_bias_(torch.tensor([big + 1, big, big, big - 1]))
    assert router.e_score_correction_bias.tolist() == [-1, 0, 0, 1]  # type: ignore[union-attr]


def test_rate_zero_and_softmax_routers_do_not_move() -> None:
    router = _biased(0.0)
    router.update_bias_(torch.tensor([9, 1, 0, 0]))
    assert not router.e_score_correction_bias.any()  # type: ignore[union-attr]
    moe = Moe(num_experts=4, top_k=1, expert_intermediate_size=4, router="softmax")
    soft = Router(moe, 8, dtype=torch.float32, device=CPU)
    soft.update_bias_(torch.tensor([9, 1, 0, 0]))
    assert soft.e_score_correction_bias is None


def test_bias_converges_to_equal_loads_and_stays() -> None:
    router = _biased(0.01, 8)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2048, 8, generator=generator) + 0.4
    with torch.no_grad():
        router.weight.normal_(0, 0.4, generator=generator)

    def loads() -> Tensor:
        return torch.bincount(router(x)[0].flatten(), minlength=8)

    spread = []
    for _ in range(300):
        now = loads()
        spread.append((now.max() / now.float().mean()).item())
        router.update_bias_(now)
    assert spread[0] > 2
    assert np.mean(spread[-50:]) < 1.25
    assert max(spread[-50:]) < 1.5  # it oscillates by a step, it does not drift


@pytest.mark.parametrize("router", ["sigmoid_noaux_tc", "softmax"])
def test_replayed_choices_of_a_whole_model_are_bit_identical(router: str) -> None:
    """What a rollout recorded, replayed in training: outputs, weights and gradients the same."""
    spec = _spec(router)
    first, second = _stage(spec), _stage(spec)
    tokens = _tokens(spec)
    out = first(tokens)
    loss(out, tokens).backward()
    for number, block in second.moe_blocks().items():
        recorded = first.moe_blocks()[number].last_choices
        assert recorded is not None
        block.routing_replay = recorded.clone()
        if block.gate.e_score_correction_bias is not None:
            block.gate.e_score_correction_bias.normal_()  # its own choices would differ
    replayed = second(tokens)
    loss(replayed, tokens).backward()
    assert torch.equal(replayed, out)
    for p, q in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    for number, block in second.moe_blocks().items():
        assert torch.equal(block.last_loads, first.moe_blocks()[number].last_loads)
        block.routing_replay = None
    if router != "softmax":
        assert not torch.equal(second(tokens), out)


def test_a_spec_without_the_loss_is_written_as_before() -> None:
    assert "sequence_balance_loss" not in MINI.model_dump_json()
    assert _spec().moe.model_dump()["sequence_balance_loss"] == 0.1  # type: ignore[union-attr]
