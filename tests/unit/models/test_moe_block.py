"""The mixture-of-experts block: router, extremes of load, replay, balancing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flopwright.models.moe.module import MixtureOfExperts
from flopwright.models.moe.router import Router
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.spec.load import load_model
from flopwright.spec.model import Moe

MINI = load_model("kimi_k2_mini")
CPU, F64 = torch.device("cpu"), torch.float64


def _block() -> MixtureOfExperts:
    stage = build_stage(MINI, [1], dtype=F64)
    init_weights_(stage, MINI, 3)
    return stage.moe_blocks()[1]


def _input(tokens: int = 20) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, tokens, MINI.hidden_size, dtype=F64, generator=generator)


def _by_hand(score: list[float], bias: list[float], moe: Moe) -> dict[int, float]:
    """Returns expert -> weight of one token, by sorting plain lists."""
    biased = [s + b for s, b in zip(score, bias, strict=True)]
    size = moe.num_experts // moe.num_groups
    groups = [biased[g * size : (g + 1) * size] for g in range(moe.num_groups)]
    strength = [sum(sorted(g, reverse=True)[:2]) for g in groups]
    open_groups = sorted(range(moe.num_groups), key=lambda g: -strength[g])[: moe.top_k_groups]
    allowed = [e for e in range(moe.num_experts) if e // size in open_groups]
    chosen = sorted(allowed, key=lambda e: -biased[e])[: moe.top_k]
    total = sum(score[e] for e in chosen) if moe.norm_top_k_prob else 1.0
    return {e: score[e] / total * moe.routed_scaling_factor for e in chosen}


@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]),
    top_k=st.integers(1, 2),
    softmax=st.booleans(),
    normalise=st.booleans(),
    seed=st.integers(0, 10_000),
)
def test_router_equals_sorting_by_hand(
    groups: tuple[int, int], top_k: int, softmax: bool, normalise: bool, seed: int
) -> None:
    moe = Moe(
        num_experts=8, top_k=top_k, expert_intermediate_size=4, num_groups=groups[0],
        top_k_groups=groups[1], router="softmax" if softmax else "sigmoid_noaux_tc",
        norm_top_k_prob=normalise, routed_scaling_factor=1.7,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    router = Router(moe, 5, dtype=F64, device=CPU)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        if router.e_score_correction_bias is not None:
            router.e_score_correction_bias.normal_(0, 0.3, generator=generator)
    x = torch.randn(6, 5, dtype=F64, generator=generator)
    choices, weights = router(x)
    logits = x @ router.weight.t()
    scores = logits.softmax(1) if softmax else 1 / (1 + (-logits).exp())
    bias = router.e_score_correction_bias
    for t in range(6):
        expected = _by_hand(scores[t].tolist(), [0.0] * 8 if bias is None else bias.tolist(), moe)
        found = dict(zip(choices[t].tolist(), weights[t].tolist(), strict=True))
        assert found == pytest.approx(expected)


def test_all_tokens_to_the_same_experts() -> None:
    block, x = _block(), _input()
    block.routing_replay = torch.arange(4).repeat(20, 1)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with nan
    try:
        out = block(x)
        out.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert block.last_loads is not None
    assert block.last_loads.tolist() == [20] * 4 + [0] * 12
    grad = block.experts.gate_up_proj.grad
    assert grad is not None
    assert grad[:4].abs().sum() > 0
    assert grad[4:].abs().sum() == 0  # experts without tokens get zero, not rubbish


def test_result_of_a_token_does_not_depend_on_its_neighbours() -> None:
    block, x = _block(), _input()
    together = block(x)
    for t in range(20):
        torch.testing.assert_close(block(x[:, t : t + 1]), together[:, t : t + 1])


def test_replay_of_recorded_choices_is_bit_identical() -> None:
    block, x = _block(), _input()
    out = block(x)
    recorded = block.last_choices
    assert recorded is not None
    block.routing_replay = recorded.clone()
    assert torch.equal(block(x), out)
    block.routing_replay = (recorded + 1) % 16
    assert not torch.allclose(block(x), out)
    assert torch.equal(block.last_choices, (recorded + 1) % 16)  # type: ignore[arg-type]


def test_loads_add_up_over_micro_batches_of_training_only() -> None:
    block, x = _block(), _input()
    block(x)
    block(x)
    assert block.loads is not None
    assert block.last_loads is not None
    assert block.last_loads.sum() == 20 * 4
    assert torch.equal(block.loads, 2 * block.last_loads)
    block.eval()
    block(x)
    assert block.loads.sum() == 160
    block.reset_loads()
    assert block.loads is None


def test_bias_moves_by_the_sign_of_the_load() -> None:
    router = Router(MINI.moe, 8, dtype=torch.bfloat16, device=CPU)  # type: ignore[arg-type]
    loads = torch.full((16,), 10)
    loads[0], loads[1] = 18, 2
    router.update_bias_(loads)
    bias = router.e_score_correction_bias
    assert bias is not None
    assert bias.tolist() == pytest.approx([-0.001, 0.001] + [0.0] * 14)


def test_bias_balances_a_skewed_router() -> None:
    moe = Moe(num_experts=16, top_k=4, expert_intermediate_size=4, bias_update_rate=0.01)
    router = Router(moe, 16, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 16, generator=generator) + 0.5
    with torch.no_grad():
        router.weight.normal_(0, 0.3, generator=generator)

    def loads() -> Tensor:
        return torch.bincount(router(x)[0].flatten(), minlength=16)

    before = loads().max().item() / 128
    for _ in range(200):
        router.update_bias_(loads())
    assert before > 1.8
    assert loads().max().item() / 128 < 1.15


def test_a_rank_that_no_token_reaches() -> None:
    block = _block()
    rows = torch.empty(0, MINI.hidden_size, dtype=F64, requires_grad=True)
    out = block.experts(rows, torch.zeros(16, dtype=torch.int64))
    assert out.shape == (0, MINI.hidden_size)
    out.sum().backward()
    assert rows.grad is not None
    for p in block.experts.parameters():
        assert p.grad is not None
        assert not p.grad.any()
