"""Low-rank adapters: merged they are the model, they alone learn, and they cost what is priced."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flopwright.models.lora.module import adapt_, adapters, merge_, wanted
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import Phase, ShardShape
from flopwright.simulator.memory.parameters import adapter_counts
from flopwright.simulator.training.layers import kind_of
from flopwright.simulator.training.lora import with_adapters
from flopwright.spec.load import load_model
from flopwright.spec.model import GqaAttention, Indexer, KdaAttention, MlaAttention, Mlp, ModelSpec
from flopwright.spec.model import Moe as MoeSpec
from flopwright.spec.parameters import parameters
from flopwright.spec.workload import LoraTargets

MLA = MlaAttention(
    num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip
MOE = MoeSpec(
    num_experts=6, top_k=3, expert_intermediate_size=10, num_shared_experts=1,
    first_dense_layers=1,
)  # fmt: skip


def _spec(**changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small", "hidden_size": 24, "num_layers": 2, "vocab_size": 41,
        "attention": GqaAttention(num_heads=4, num_kv_heads=2, head_dim=6),
        "mlp": Mlp(intermediate_size=36),
    }  # fmt: skip
    return ModelSpec(**(data | changes))


SPECS = {
    "gqa": _spec(attention=GqaAttention(num_heads=4, num_kv_heads=2, head_dim=6, bias=True)),
    "mla_moe": _spec(attention=MLA, moe=MOE),
    "kda_latent": _spec(
        attention=MLA.model_copy(update={"rope": None, "output_gate": True}),
        linear_attention=KdaAttention(num_heads=2, head_dim=8, conv_kernel=3, gate_rank=6),
        full_attention_layers=(1,), moe=MOE.model_copy(update={"latent_size": 14}),
    ),
    "sparse": _spec(
        attention=MLA.model_copy(
            update={"indexer": Indexer(num_heads=3, head_dim=6, top_k=5)}
        )
    ),
}  # fmt: skip
RANK = 3


def _stage(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1), dtype=dtype)
    init_weights_(stage, spec, 0)
    return stage


def _adapted(spec: ModelSpec, dtype: torch.dtype = torch.float64, **how: Any) -> Stage:
    """Returns a stage whose adapters are not 0 any more."""
    stage = _stage(spec, dtype)
    adapt_(stage, RANK, **how)
    with torch.no_grad():
        for i, (_, adapter) in enumerate(adapters(stage)):
            drawn = torch.randn(adapter.up.shape, generator=torch.Generator().manual_seed(i))
            adapter.up.copy_(0.3 * drawn)
    return stage


def _tokens(rows: int = 2, seq: int = 16) -> Tensor:
    return torch.randint(41, (rows, seq), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", SPECS)
def test_at_first_adapters_change_nothing(name: str) -> None:
    stage, adapted = _stage(SPECS[name]), _stage(SPECS[name])
    adapt_(adapted, RANK)
    with torch.no_grad():
        assert torch.equal(stage(_tokens()), adapted(_tokens()))


@pytest.mark.parametrize("name", SPECS)
def test_merged_they_are_the_adapted_model(name: str) -> None:
    stage = _adapted(SPECS[name], alpha=7.0).eval()
    plain = _stage(SPECS[name]).eval()
    with torch.no_grad():
        before, untouched = stage(_tokens()), plain(_tokens())
        cache, parts = stage.make_cache(2, 16), []
        for first, last in ((0, 9), (9, 10), (10, 16)):
            parts.append(stage(_tokens()[:, first:last], cache))
        merge_(stage)
        after = stage(_tokens())
    assert (before - untouched).abs().max() > 1e-3
    torch.testing.assert_close(after, before, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat(parts, 1), before, rtol=1e-9, atol=1e-11)
    assert stage.state_dict().keys() == plain.state_dict().keys()
    assert not list(adapters(stage))
    assert all(p.requires_grad for p in stage.parameters())


@pytest.mark.parametrize("name", SPECS)
def test_only_adapters_learn_and_as_the_changed_matrix_would(name: str) -> None:
    """dL/dup = scale * dL/dW down^T and dL/ddown = scale * up^T dL/dW, W the merged matrix."""
    stage = _adapted(SPECS[name], alpha=7.0)
    loss(stage(_tokens()), _tokens().roll(-1, 1)).backward()
    own = {f"{n}.{leaf}" for n, a in adapters(stage) for leaf, _ in a.named_parameters()}
    learnt = {n for n, p in stage.named_parameters() if p.grad is not None}
    assert len(learnt) == len(own)
    assert all("adapter" in n for n in learnt)
    merged = _adapted(SPECS[name], alpha=7.0)
    pairs = dict(adapters(stage))
    merge_(merged)
    loss(merged(_tokens()), _tokens().roll(-1, 1)).backward()
    for path, adapter in pairs.items():
        whole = merged.get_parameter(path).grad
        assert whole is not None
        up, down = adapter.up.grad, adapter.down.grad
        assert up is not None
        assert down is not None
        expected = adapter.scale * whole @ adapter.down.transpose(-1, -2)
        torch.testing.assert_close(up, expected, rtol=1e-9, atol=1e-12, msg=path)
        expected = adapter.scale * adapter.up.transpose(-1, -2) @ whole
        torch.testing.assert_close(down, expected, rtol=1e-9, atol=1e-12, msg=path)


@pytest.mark.parametrize("targets", ["all", "attention", "qkv"])
@pytest.mark.parametrize("name", SPECS)
def test_what_is_trained_is_what_memory_is_priced_for(name: str, targets: LoraTargets) -> None:
    """States and gradients are those of adapters alone."""
    spec, one = SPECS[name], np.ones(1)
    stage = build_stage(spec, range(-1, spec.num_layers + 1), device="meta")
    adapt_(stage, RANK, targets=targets)
    trained = sum(p.numel() for p in stage.parameters() if p.requires_grad)
    priced = 0.0
    for layer in range(-1, spec.num_layers + 1):
        counts = adapter_counts(spec, layer, one, one, RANK, targets=targets)
        priced += float((counts.dense + counts.expert)[0])
    assert trained == priced
    assert trained > 0
    names = {p.name for p in parameters(spec) if wanted(p, targets)}
    assert {n for n, _ in adapters(stage)} == names


@pytest.mark.parametrize("name", ["gqa", "mla_moe", "kda_latent"])
def test_executed_flops_are_the_priced_ones(name: str, flop_counter: Any) -> None:
    spec = SPECS[name]
    shape = ShardShape(micro_batch_size=2, seq_len=16, dtype="bf16")
    for layer in range(spec.num_layers):
        stage = build_stage(spec, [layer], dtype=torch.bfloat16)
        init_weights_(stage, spec, 0)
        adapt_(stage, RANK)
        x = torch.randn(2, 16, 24, dtype=torch.bfloat16).requires_grad_()
        with flop_counter() as forward:
            out = stage(x)
        with flop_counter() as backward:
            out.backward(torch.ones_like(out))
        cost = layer_cost(spec, layer, shape)
        ops = with_adapters(cost, RANK, "bf16", kind_of(spec, layer)).ops
        assert forward.flops == ops.total_flops(Phase.FORWARD).item(), layer
        assert backward.flops == ops.total_flops().item() - forward.flops, layer


@pytest.mark.parametrize("name", ["gqa", "mla_moe", "kda_latent"])
def test_kept_bytes_are_the_priced_ones(name: str, count_saved_bytes: Any) -> None:
    """Beside what the layer keeps: each adapter's inner rows."""
    spec = SPECS[name]
    shape = ShardShape(micro_batch_size=2, seq_len=16, dtype="bf16")
    for layer in range(spec.num_layers):
        stage = build_stage(spec, [layer], dtype=torch.bfloat16)
        init_weights_(stage, spec, 0)
        adapt_(stage, RANK)
        x = torch.randn(2, 16, 24, dtype=torch.bfloat16).requires_grad_()
        found, out = count_saved_bytes(stage, lambda x=x, stage=stage: stage(x))
        lives = with_adapters(
            layer_cost(spec, layer, shape), RANK, "bf16", kind_of(spec, layer)
        ).lives
        assert lives.bytes.sum() == found, layer
        out.backward(torch.ones_like(out))


def test_a_frozen_model_learns_through_its_adapters() -> None:
    spec = SPECS["mla_moe"]
    stage = _stage(spec, torch.float32).train()
    adapt_(stage, 8)
    frozen = {n: p.clone() for n, p in stage.named_parameters() if not p.requires_grad}
    trained = [p for p in stage.parameters() if p.requires_grad]
    optimizer, row = torch.optim.AdamW(trained, lr=2e-2), _tokens(4, 17)
    told = []
    for _ in range(25):
        optimizer.zero_grad()
        value = loss(stage(row[:, :-1]), row[:, 1:])
        value.backward()
        optimizer.step()
        told.append(value.item())
    assert told[-1] < told[0] - 0.3
    assert all(torch.equal(stage.get_parameter(n), p) for n, p in frozen.items())


def test_first_values_are_the_partitions() -> None:
    spec = SPECS["mla_moe"]
    whole, part = _stage(spec), build_stage(spec, [1], ep_size=3, ep_rank=1, dtype=torch.float64)
    init_weights_(part, spec, 0)
    for stage in (whole, part):
        adapt_(stage, RANK, seed=5)
    found, expected = dict(adapters(part)), dict(adapters(whole))
    for name, adapter in found.items():
        full = expected[name].down
        own = full[2:4] if "experts." in name and "shared" not in name else full
        assert torch.equal(adapter.down, own), name


def test_real_models_have_the_priced_number_of_adapters() -> None:
    for name, layer in (("llama31_8b", 0), ("deepseek_v3", 4), ("deepseek_v32", 4)):
        spec = load_model(name)
        stage = build_stage(spec, [layer], device="meta", dtype=torch.bfloat16)
        adapt_(stage, 16)
        counts = adapter_counts(spec, layer, np.ones(1), np.ones(1), 16)
        trained = sum(p.numel() for p in stage.parameters() if p.requires_grad)
        assert trained == (counts.dense + counts.expert)[0]
