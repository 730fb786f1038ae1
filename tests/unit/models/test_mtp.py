"""Multi-token prediction: the trained loss against plain float64 code, and its cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from flopwright.errors import InputError
from flopwright.models.saving import Saver, SavingPolicy
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_
from flopwright.ops import Phase, ShardShape
from flopwright.spec.attention import GqaAttention
from flopwright.spec.load import load_model
from flopwright.spec.model import Mlp, ModelSpec, Moe
from flopwright.spec.parameters import num_params, parameters

GQA = GqaAttention(num_heads=4, num_kv_heads=2, head_dim=6)


def _spec(**changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small", "hidden_size": 24, "num_layers": 2, "vocab_size": 41, "attention": GQA,
        "mlp": Mlp(intermediate_size=36), "mtp_layers": 2, "mtp_loss_weight": 0.3,
    }  # fmt: skip
    return ModelSpec(**(data | changes))


MOE = Moe(num_experts=6, top_k=3, expert_intermediate_size=10, num_shared_experts=1)


def _stage(spec: ModelSpec, dtype: torch.dtype = torch.float64) -> Stage:
    stage = build_stage(spec, range(-1, spec.num_layers + 1 + spec.mtp_layers), dtype=dtype)
    init_weights_(stage, spec, 3)
    with torch.no_grad():
        for i, p in enumerate(stage.parameters()):
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
            p.add_(0.2 * noise.to(dtype) / (p.shape[-1] ** 0.5 if p.ndim > 1 else 2))
    stage.loss_apart = True
    return stage.train()


def _tokens(spec: ModelSpec, rows: int = 2, seq: int = 9) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(
        spec.vocab_size, (rows, seq + 1), generator=torch.Generator().manual_seed(1)
    )
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def _layer(w: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """A layer of grouped-query attention and SwiGLU, written out."""
    b, s, _ = x.shape
    n = _norm(x, w[f"{prefix}.input_layernorm.weight"])
    angles = torch.arange(s).double().outer(10_000.0 ** (-torch.arange(0, 6, 2).double() / 6))

    def heads(name: str, count: int) -> Tensor:
        return (n @ w[f"{prefix}.self_attn.{name}.weight"].t()).view(b, s, count, 6)

    def turned(t: Tensor) -> Tensor:
        cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        first, second = t.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    q, k = turned(heads("q_proj", 4)), turned(heads("k_proj", 2)).repeat_interleave(2, 2)
    v = heads("v_proj", 2).repeat_interleave(2, 2)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / math.sqrt(6)
    hidden = torch.ones(s, s, dtype=torch.bool).triu(1)
    p = scores.masked_fill(hidden, -math.inf).softmax(-1)
    mixed = torch.einsum("bhst,bthd->bshd", p, v).flatten(2)
    x = x + mixed @ w[f"{prefix}.self_attn.o_proj.weight"].t()
    n = _norm(x, w[f"{prefix}.post_attention_layernorm.weight"])
    inner = F.silu(n @ w[f"{prefix}.mlp.gate_proj.weight"].t())
    inner = inner * (n @ w[f"{prefix}.mlp.up_proj.weight"].t())
    return x + inner @ w[f"{prefix}.mlp.down_proj.weight"].t()


def _reference(spec: ModelSpec, w: dict[str, Tensor], row: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns (the model's loss, each module's) of whole rows [B, S + 1], position by position."""
    tokens, length = row[:, :-1], row.shape[1] - 1
    x = w["model.embed_tokens.weight"][tokens]
    for number in range(spec.num_layers):
        x = _layer(w, f"model.layers.{number}", x)
    state = _norm(x, w["model.norm.weight"])

    def nats(states: Tensor, places: range, ahead: int) -> Tensor:
        logits = (states @ w["lm_head.weight"].t()).log_softmax(-1)
        told = [-logits[b, i, row[b, i + ahead]] for b in range(len(row)) for i in places]
        return torch.stack(told).mean()

    own, extra = nats(state, range(length), 1), []
    for k in range(1, spec.mtp_layers + 1):
        prefix = f"model.layers.{spec.num_layers + k}"
        # The last k places have no token so far behind them: what stands there is not looked at.
        behind = torch.stack([row[:, min(i + k, length)] for i in range(length)], 1)
        e = _norm(w["model.embed_tokens.weight"][behind], w[f"{prefix}.enorm.weight"])
        joined = torch.cat((e, _norm(state, w[f"{prefix}.hnorm.weight"])), -1)
        x = _layer(w, prefix, joined @ w[f"{prefix}.eh_proj.weight"].t())
        state = _norm(x, w[f"{prefix}.shared_head.norm.weight"])
        extra.append(nats(state, range(length - k), k + 1))
    return own, extra


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("modules", [1, 2])
def test_loss_and_gradients_equal_plain_code(modules: int, fused: bool) -> None:
    spec = _spec(mtp_layers=modules)
    stage = _stage(spec)
    stage.loss_apart = not fused
    tokens, targets = _tokens(spec)
    value = stage(tokens, targets=targets)
    value.backward()
    w = {n: p.detach().clone().requires_grad_() for n, p in stage.named_parameters()}
    row = torch.cat((tokens, targets[:, -1:]), 1)
    own, extra = _reference(spec, w, row)
    torch.testing.assert_close(value.detach(), own.detach(), rtol=1e-12, atol=1e-13)
    for a, b in zip(stage.prediction_losses, extra, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-13)
    (own + 0.3 * torch.stack(extra).mean()).backward()
    for n, p in stage.named_parameters():
        torch.testing.assert_close(p.grad, w[n].grad, rtol=1e-9, atol=1e-12, msg=n)


@pytest.mark.parametrize("moe", [None, MOE])
def test_with_weight_zero_the_model_learns_as_without(moe: Moe | None) -> None:
    spec = _spec(mtp_loss_weight=0.0, moe=moe)
    stage, (tokens, targets) = _stage(spec), _tokens(spec)
    stage(tokens, targets=targets).backward()
    plain = _spec(mtp_layers=0, moe=moe)
    without = _stage(plain)
    without.load_state_dict({n: stage.state_dict()[n] for n in without.state_dict()})
    value = without.loss(without(tokens), targets)
    value.backward()
    for n, p in without.named_parameters():
        assert p.grad is not None
        assert torch.equal(stage.get_parameter(n).grad, p.grad), n
    assert torch.equal(stage(tokens), without(tokens))  # logits never know of the modules


def test_a_module_trains_and_predicts_the_token_after_next() -> None:
    """Every token is its predecessor plus one: what follows two places on is certain as well."""
    spec = _spec(mtp_layers=1, mtp_loss_weight=1.0)
    stage = _stage(spec, torch.float32)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=5e-3)
    generator, told = torch.Generator().manual_seed(0), []
    for _ in range(60):
        first = torch.randint(41, (8, 1), generator=generator)
        row = (first + torch.arange(13)) % 41
        optimizer.zero_grad()
        stage(row[:, :-1].contiguous(), targets=row[:, 1:].contiguous()).backward()
        optimizer.step()
        told.append(stage.prediction_losses[0].item())
    assert told[0] > 3.0
    assert told[-1] < 0.5


@pytest.fixture(scope="module")
def specs() -> dict[str, ModelSpec]:
    layers = {"attention": GQA.model_copy(update={"qk_norm": True}), "norm": "layer_norm"}
    return {"dense": _spec(), "moe": _spec(moe=MOE), "layer_norm": _spec(**layers)}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["fp64", "bf16"])
@pytest.mark.parametrize("name", ["dense", "moe", "layer_norm"])
def test_kept_bytes_of_head_and_modules_together(
    name: str, dtype: str, fused: bool, specs: dict[str, ModelSpec], count_saved_bytes: Any
) -> None:
    spec, kind = specs[name], {"fp64": torch.float64, "bf16": torch.bfloat16}[dtype]
    stage = _stage(spec, kind)
    stage.loss_apart = not fused
    tokens, targets = _tokens(spec)
    found, out = count_saved_bytes(stage, lambda: stage(tokens, targets=targets))
    shape = ShardShape(micro_batch_size=2, seq_len=9, dtype=dtype, fused_loss=fused)
    layers = range(-1, spec.num_layers + 3)
    assert sum(layer_cost(spec, n, shape).lives.bytes.sum() for n in layers) == found
    out.backward()


@pytest.mark.parametrize("name", ["dense", "moe", "layer_norm"])
def test_flops_of_the_whole_step(
    name: str, specs: dict[str, ModelSpec], flop_counter: Any
) -> None:
    spec, (tokens, targets) = specs[name], _tokens(specs[name])
    stage = _stage(spec, torch.float32)
    with flop_counter() as forward:
        out = stage(tokens, targets=targets)
    with flop_counter() as backward:
        out.backward()
    shape = ShardShape(micro_batch_size=2, seq_len=9, dtype="fp32")
    priced = [layer_cost(spec, n, shape).ops for n in range(-1, spec.num_layers + 3)]
    ahead = sum(ops.total_flops(Phase.FORWARD).item() for ops in priced)
    assert forward.flops == ahead
    assert backward.flops == sum(ops.total_flops().item() for ops in priced) - ahead


@pytest.mark.parametrize(
    "policy",
    [
        SavingPolicy(recompute="full"),
        SavingPolicy(recompute="selective", groups=frozenset({"norm", "swiglu"})),
        SavingPolicy(recompute="selective", groups=frozenset({"core_attn", "moe"})),
    ],
    ids=["full", "norms", "blocks"],
)
def test_gradients_are_the_same_whatever_is_kept(policy: SavingPolicy) -> None:
    spec = _spec(moe=MOE)
    tokens, targets = _tokens(spec)
    found = []
    for used in (None, policy):
        stage = _stage(spec, torch.float32)
        if used is None:
            out = stage(tokens, targets=targets)
        else:
            with Saver(used).forward():
                out = stage(tokens, targets=targets)
        torch.autograd.backward((get_gradient_edge(out),), (torch.ones_like(out),))
        found.append({n: p.grad for n, p in stage.named_parameters()})
    for n, grad in found[0].items():
        assert torch.equal(found[1][n], grad), n


def test_parameters_and_their_names_are_the_lists() -> None:
    spec = load_model("deepseek_v3_mtp")
    stage = build_stage(spec, range(-1, 63), device="meta")
    held = {n: tuple(t.shape) for n, t in (*stage.named_parameters(), *stage.named_buffers())}
    assert held == {p.name: p.shape for p in parameters(spec)}
    # The published 11.5 billion of its own: layer 61's without the shared table and head.
    own = num_params(spec) - num_params(load_model("deepseek_v3"))
    assert own == pytest.approx(11.5e9, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [{"positions": "learned", "max_seq_len": 32}, {"attn_res_block": 1}, {"mtp_loss_weight": -1}],
)
def test_what_does_not_go_with_it_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"."):
        _spec(**change)


def _plan(**parallel: Any) -> Any:
    from flopwright.plan.parallel import ParallelPlan
    from flopwright.spec.load import load_cluster, make_plan_file
    from flopwright.spec.scenario import Scenario
    from flopwright.spec.workload import Workload

    workload = Workload(seq_len=32, global_batch_size=8, total_tokens=10**6)
    scenario = Scenario(
        name="t", model=_spec(mtp_layers=1), cluster=load_cluster("64_h100"), workload=workload
    )
    return make_plan_file(scenario, ParallelPlan(**parallel), "t")


@pytest.mark.parametrize(
    ("parallel", "refused"),
    [
        ({}, False),
        ({"dp_shard": 2}, False),
        ({"pp": 2}, True),
        ({"tp": 2}, True),
        ({"cp": 2}, True),
    ],
)
def test_the_executor_runs_it_where_nothing_is_cut(
    parallel: dict[str, Any], refused: bool, unsupported: Callable[[Any], Any]
) -> None:
    fields = {v.field for v in unsupported(_plan(**parallel))}
    assert ("model.mtp_layers" in fields) == refused


@pytest.fixture
def unsupported() -> Callable[[Any], Any]:
    from flopwright.executor.launch.supported import unsupported as found

    return found


def test_a_config_json_does_not_say_the_weight_but_refuses_modules() -> None:
    from flopwright.models.hf.config_out import hf_config

    spec = load_model("deepseek_v3_mtp")
    with pytest.raises(InputError) as caught:
        hf_config(spec)
    assert {v.field for v in caught.value.violations} == {"mtp_layers"}
