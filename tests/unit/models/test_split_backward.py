"""A backward pass in two halves: the same gradients, and neither half does the other's work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flopwright.kernels.gradients import deferring
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import Phase, ShardShape
from flopwright.spec.model import GqaAttention, MlaAttention, Mlp, ModelSpec, Moe

MLA = MlaAttention(
    num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip
COMMON: dict[str, Any] = {"hidden_size": 24, "num_layers": 2, "vocab_size": 41}
SPECS = {
    "k2": ModelSpec(
        name="k2",
        attention=MLA,
        mlp=Mlp(intermediate_size=36),
        moe=Moe(
            num_experts=6,
            top_k=3,
            expert_intermediate_size=10,
            num_shared_experts=1,
            first_dense_layers=1,
            sequence_balance_loss=0.01,
        ),
        **COMMON,
    ),
    "llama": ModelSpec(
        name="llama",
        attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=6),
        mlp=Mlp(intermediate_size=36),
        **COMMON,
    ),
    "gpt2": ModelSpec(
        name="gpt2",
        attention=GqaAttention(
            num_heads=4, num_kv_heads=4, head_dim=6, rope=None, bias=True, o_bias=True
        ),
        mlp=Mlp(kind="gelu", intermediate_size=36, bias=True),
        norm="layer_norm",
        positions="learned",
        max_seq_len=32,
        **COMMON,
    ),
}
# First chunk (tokens in), middle, last (loss out), all of the model.
CHUNKS = [[-1, 0], [0, 1], [1, 2], [-1, 0, 1, 2]]


def _stage(spec: ModelSpec, layers: list[int]) -> tuple[Stage, Tensor, Tensor]:
    stage = build_stage(spec, layers, dtype=torch.float64)
    init_weights_(stage, spec, 0)
    torch.manual_seed(1)
    tokens = torch.randint(spec.vocab_size, (2, 8))
    return stage, tokens, torch.randn(2, 8, spec.hidden_size, dtype=torch.float64)


def _run(stage: Stage, tokens: Tensor, hidden: Tensor) -> tuple[Tensor | None, Tensor]:
    source = None if stage.has_embedding else hidden.clone().requires_grad_()
    out = stage(tokens if source is None else source)
    return source, loss(out, tokens) if stage.has_head else out


def _gradient(out: Tensor) -> Tensor:
    return torch.full_like(out, 0.5) if out.ndim == 0 else out.detach().cos()


def _weights(stage: Stage) -> dict[str, nn.Parameter]:
    return {n: p for n, p in stage.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("layers", CHUNKS, ids=str)
@pytest.mark.parametrize("name", [*SPECS, "tied"])
def test_both_halves_together_are_the_whole(name: str, layers: list[int]) -> None:
    spec = SPECS.get(name, SPECS["llama"].model_copy(update={"tied_embeddings": True}))
    stage, tokens, hidden = _stage(spec, layers)
    weights = _weights(stage)
    source, out = _run(stage, tokens, hidden)
    out.backward(_gradient(out))
    whole = {n: p.grad for n, p in weights.items()}
    stage.zero_grad()
    hooked: list[str] = []
    for n, p in weights.items():
        p.register_post_accumulate_grad_hook(lambda _, n=n: hooked.append(n))
    again, out = _run(stage, tokens, hidden)
    with deferring() as owed:
        out.backward(_gradient(out))
    if source is not None:
        assert again is not None
        assert source.grad is not None
        assert again.grad is not None
        assert torch.equal(source.grad, again.grad)
    # Matrices are left for later; "embed_positions" is added by a plain torch op.
    early = {n for n, p in weights.items() if p.grad is not None}
    assert all("norm" in n or "embed_positions" in n for n in early)
    owed.pay()
    assert set(hooked) == set(weights)
    for n, p in weights.items():
        expected = whole[n]
        assert expected is not None
        assert p.grad is not None
        assert torch.equal(p.grad, expected), n


@pytest.mark.parametrize("layers", CHUNKS, ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_each_half_computes_what_the_cost_rows_say(
    name: str, layers: list[int], flop_counter: Any
) -> None:
    spec = SPECS[name]
    stage, tokens, hidden = _stage(spec, layers)
    _, out = _run(stage, tokens, hidden)
    with flop_counter() as first, deferring() as owed:
        out.backward(_gradient(out))
    with flop_counter() as second:
        owed.pay()
    shape = ShardShape(micro_batch_size=2, seq_len=8, dtype="fp64")
    rows = [layer_cost(spec, layer, shape).ops for layer in layers]
    expected = [
        sum(ops.total_flops(phase).item() for ops in rows)
        for phase in (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    ]
    assert [first.flops, second.flops] == expected


def test_what_is_saved_is_let_go_with_the_first_half() -> None:
    stage, tokens, hidden = _stage(SPECS["k2"], [0, 1])
    kept = 0

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal kept
            self.tensor = tensor
            kept += 1

        def __del__(self) -> None:
            nonlocal kept
            kept -= 1

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        _, out = _run(stage, tokens, hidden)
    assert kept > 0
    with deferring():
        out.backward(_gradient(out))
    assert kept == 0
