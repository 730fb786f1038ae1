"""cost.py and module.py of every block say the same: executed FLOPs and bytes kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from flopwright.executor.parallel.context import GroupContextParallel
from flopwright.executor.parallel.experts import Clock, _reorder
from flopwright.executor.parallel.groups import Group
from flopwright.models.moe.dispatch import Dispatched
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.ops import OpKind, Phase, ShardShape
from flopwright.plan.parallel import ContextName
from flopwright.spec.load import load_model
from flopwright.spec.model import (
    GqaAttention,
    Indexer,
    KdaAttention,
    MlaAttention,
    Mlp,
    ModelSpec,
    Moe,
    Rope,
)

pytestmark = pytest.mark.slow

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
MLA = MlaAttention(
    num_heads=2, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip

INDEX = Indexer(num_heads=3, head_dim=6, top_k=5)
INDEXED = MLA.model_copy(update={"indexer": INDEX})
NOPE = MLA.model_copy(update={"rope": None})
KDA = KdaAttention(num_heads=2, head_dim=8, conv_kernel=3, gate_rank=6)
SITU = Mlp(kind="situ_glu", intermediate_size=36, gate_bound=4, up_bound=25)


def _spec(**changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small",
        "hidden_size": 24,
        "num_layers": 2,
        "vocab_size": 41,
        "attention": MLA,
        "mlp": Mlp(intermediate_size=36),
    }
    return ModelSpec(**(data | changes))


def _gqa(**changes: Any) -> GqaAttention:
    return GqaAttention(**({"num_heads": 4, "num_kv_heads": 2, "head_dim": 6} | changes))


def _moe(**changes: Any) -> Moe:
    data = {"num_experts": 6, "top_k": 3, "expert_intermediate_size": 10, "first_dense_layers": 1}
    return Moe(**(data | changes))


SPECS = {
    "mla_swiglu": _spec(),
    "mla_without_q_lora": _spec(attention=MLA.model_copy(update={"q_lora_rank": None})),
    "gqa_swiglu": _spec(attention=_gqa()),
    "gqa_norm_bias": _spec(attention=_gqa(qk_norm=True, bias=True)),
    "gqa_norm_without_rope": _spec(attention=_gqa(qk_norm=True, rope=None)),
    "mha_gelu_learned": _spec(
        attention=_gqa(num_kv_heads=4, rope=None),
        mlp=Mlp(kind="gelu", intermediate_size=36),
        positions="learned",
        max_seq_len=32,
    ),
    "gpt2": _spec(
        attention=_gqa(num_kv_heads=4, rope=None, bias=True, o_bias=True),
        mlp=Mlp(kind="gelu", intermediate_size=36, bias=True),
        norm="layer_norm",
        positions="learned",
        max_seq_len=32,
    ),
    "gqa_window": _spec(attention=_gqa(sliding_window=5, first_window_layer=1)),
    "swiglu_bias_layer_norm": _spec(mlp=Mlp(intermediate_size=36, bias=True), norm="layer_norm"),
    "moe_shared": _spec(moe=_moe(num_shared_experts=2)),
    "moe_softmax": _spec(moe=_moe(router="softmax", norm_top_k_prob=False)),
    "gqa_norm_whole": _spec(attention=_gqa(qk_norm=True, qk_norm_whole=True)),
    "gpt_oss": _spec(
        attention=_gqa(sinks=True, bias=True, o_bias=True),
        mlp=Mlp(kind="clamped_glu", intermediate_size=8, limit=7),
        moe=_moe(router="softmax", bias=True, first_dense_layers=0),
    ),
    "gqa_sinks": _spec(attention=_gqa(sinks=True, sliding_window=5, full_every=2)),
    "relu2_half_rotary": _spec(
        attention=_gqa(head_dim=8, rope=Rope(fraction=0.5), qk_norm=True),
        mlp=Mlp(kind="relu2", intermediate_size=36),
    ),
    "kda": _spec(
        attention=NOPE, linear_attention=KDA, full_attention_layers=(1,), moe=_moe(num_groups=2)
    ),
    "kda_low_rank_gate": _spec(
        linear_attention=KDA.model_copy(update={"output_gate_rank": 4}), full_attention_layers=(1,)
    ),
    "gated_latent": _spec(attention=NOPE.model_copy(update={"output_gate": True})),
    "situ_glu": _spec(mlp=SITU, moe=_moe(num_shared_experts=1)),
    "latent_experts": _spec(moe=_moe(num_shared_experts=2, latent_size=14)),
    "attention_residuals": _spec(attn_res_block=2, num_layers=4),
    "k3": _spec(
        attention=NOPE.model_copy(update={"output_gate": True}),
        linear_attention=KDA.model_copy(update={"decay_lower_bound": -5.0}),
        full_attention_layers=(2,),
        attn_res_block=1,
        num_layers=3,
        mlp=SITU,
        moe=_moe(num_shared_experts=2, latent_size=14, balance="quantile"),
    ),
    "sparse": _spec(attention=INDEXED),
    "sparse_whole": _spec(
        attention=INDEXED.model_copy(
            update={"indexer": INDEX.model_copy(update={"top_k": 16}), "output_gate": True}
        )
    ),
    "moe_groups": _spec(moe=_moe(num_groups=3, top_k_groups=2), attention=_gqa(rope=Rope())),
}
# Rows of linear attention that carry a state from rank to rank.
_ACROSS = ("attention.summary", "attention.state_gradient", "attention.carried")
Count = Callable[[Stage, Callable[[], Tensor]], tuple[int, Tensor]]


def _run(spec: ModelSpec, layer: int, dtype: str, device: str, batch: int, seq: int) -> Any:
    stage = build_stage(spec, [layer], dtype=DTYPES[dtype], device=device)
    torch.manual_seed(0)
    tokens = torch.zeros(batch, seq, dtype=torch.int64, device=device)
    if device == "cpu":
        init_weights_(stage, spec, 0)
        tokens.random_(spec.vocab_size)
    sums = _sums(spec, layer)
    shape = (sums * batch, seq, spec.hidden_size)
    x = torch.randn(shape, dtype=DTYPES[dtype], device=device).requires_grad_()
    if layer == -1:
        return stage, lambda: stage(tokens)
    if layer == spec.num_layers:
        return stage, lambda: loss(stage(x), tokens)
    return stage, lambda: stage(x)


def _sums(spec: ModelSpec, layer: int) -> int:
    """Returns how many sums of attention residuals come into a layer."""
    return spec.residual_sources(max(layer, 0))[0]


def _standing(spec: ModelSpec, layer: int, batch: int, seq: int, dtype: str) -> int:
    """Returns the bytes of finished sums that come into a layer: the layers before kept them."""
    finished = 0 if layer < 0 else _sums(spec, layer) - 1
    return finished * batch * seq * spec.hidden_size * DTYPES[dtype].itemsize


def _shape(batch: int, seq: int, dtype: str) -> ShardShape:
    return ShardShape(micro_batch_size=batch, seq_len=seq, dtype=dtype)


def _flops(counter: Any, forward: Callable[[], Tensor]) -> tuple[int, int]:
    with counter() as count:
        out = forward()
    with counter() as backward:
        out.backward(torch.ones_like(out))
    return count.flops, backward.flops


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("name", SPECS)
def test_kept_bytes_on_cpu(name: str, dtype: str, count_saved_bytes: Count) -> None:
    spec = SPECS[name]
    for layer in range(-1, spec.num_layers + 1):
        stage, forward = _run(spec, layer, dtype, "cpu", 2, 16)
        found, out = count_saved_bytes(stage, forward)
        found -= _standing(spec, layer, 2, 16, dtype)
        assert layer_cost(spec, layer, _shape(2, 16, dtype)).lives.bytes.sum() == found, layer
        out.backward(torch.ones_like(out))


@pytest.mark.parametrize("name", SPECS)
def test_flops_on_cpu(name: str, flop_counter: Any) -> None:
    spec = SPECS[name]
    for layer in range(-1, spec.num_layers + 1):
        _, forward = _run(spec, layer, "fp32", "cpu", 2, 16)
        ops = layer_cost(spec, layer, _shape(2, 16, "fp32")).ops
        found = _flops(flop_counter, forward)
        backward = ops.total_flops(Phase.BACKWARD_INPUT) + ops.total_flops(Phase.BACKWARD_WEIGHT)
        assert (ops.total_flops(Phase.FORWARD).item(), backward.item()) == found, layer


REAL = [("deepseek_v32", n) for n in (0, 3)]
REAL += [("kimi_k2", n) for n in (-1, 0, 1, 61)] + [("kimi_k3", n) for n in (0, 1, 15, 92, 93)]


@pytest.mark.parametrize(("name", "layer"), [*REAL, ("kimi_linear_48b_a3b", 1)])
def test_kept_bytes_at_real_shapes(name: str, layer: int, count_saved_bytes: Count) -> None:
    spec = load_model(name)
    stage, forward = _run(spec, layer, "bf16", "meta", 1, 4096)
    found, _ = count_saved_bytes(stage, forward)
    found -= _standing(spec, layer, 1, 4096, "bf16")
    assert layer_cost(spec, layer, _shape(1, 4096, "bf16")).lives.bytes.sum() == found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), [r for r in REAL if r[1] >= 0])
def test_flops_at_real_shapes(name: str, layer: int, flop_counter: Any) -> None:
    spec = load_model(name)
    seq = 4096
    _, forward = _run(spec, layer, "bf16", "meta", 1, seq)
    ops = layer_cost(spec, layer, _shape(1, seq, "bf16")).ops
    assert ops.total_flops().item() == sum(_flops(flop_counter, forward))


class _Neighbours:
    """Stands for the other ranks of an expert group at balanced load, without data.

    Rows are regrouped by the executor's own function: it keeps where they go.
    """

    def __init__(self, ep: int) -> None:
        self.ep = ep

    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        local = counts.shape[0] // self.ep
        order, place = (counts.new_empty(rows.shape[0]) for _ in range(2))
        regrouped = _reorder(rows.clone(), order, place)
        return Dispatched(regrouped, counts.new_empty(local), (order, place))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        order, place = handle
        return _reorder(rows, place, order).clone()


@pytest.mark.parametrize("ep", [2, 16, 384])
def test_expert_parallel_rank_at_k2_shapes(
    ep: int, count_saved_bytes: Count, flop_counter: Any
) -> None:
    spec = load_model("kimi_k2")
    stage = build_stage(
        spec, [1], dispatcher=_Neighbours(ep), ep_size=ep, ep_rank=ep - 1, device="meta",
        dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.empty(1, 64, 7168, dtype=torch.bfloat16, device="meta").requires_grad_()
    cost = layer_cost(spec, 1, ShardShape(seq_len=64, ep=ep))
    found, _ = count_saved_bytes(stage, lambda: stage(x))
    assert cost.lives.bytes.sum() == found
    assert cost.ops.total_flops().item() == sum(_flops(flop_counter, lambda: stage(x)))
    exchanged = cost.comms.bytes[:, 0] * cost.comms.count[:, 0]
    assert exchanged.sum() == 4 * 64 * 8 * 7168 * 2 * (ep - 1) / ep


class _SameEverywhere(GroupContextParallel):
    """Stands for the other ranks of a context group: each has what this one has."""

    __slots__ = ()

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        return x.repeat(self.size, 1)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("name", "layer", "dtype", "cp", "seq"),
    [("kda", 0, "fp64", 2, 40), ("kda", 0, "bf16", 4, 64), ("kimi_k3", 1, "bf16", 8, 16384)],
)
def test_context_parallel_rank_of_linear_attention(
    name: str, layer: int, dtype: str, cp: int, seq: int, kind: ContextName,
    count_saved_bytes: Count, flop_counter: Any,
) -> None:  # fmt: skip
    real = name not in SPECS
    spec, device = (load_model(name), "meta") if real else (SPECS[name], "cpu")
    group = Group(tuple(range(cp)), cp - 1, None)
    context = _SameEverywhere(group, cast(Clock, None), kind)
    stage = build_stage(spec, [layer], context=context, dtype=DTYPES[dtype], device=device)
    if not real:
        init_weights_(stage, spec, 0)
    shape = (_sums(spec, layer) * 2, seq // cp, spec.hidden_size)
    x = torch.zeros(shape, dtype=DTYPES[dtype], device=device).requires_grad_()
    cost = layer_cost(
        spec,
        layer,
        ShardShape(micro_batch_size=2, seq_len=seq, cp=cp, ulysses=kind == "ulysses", dtype=dtype),
    )
    found, _ = count_saved_bytes(stage, lambda: stage(x))
    found -= _standing(spec, layer, 2, seq // cp, dtype)
    assert cost.lives.bytes.sum() == found
    assert cost.ops.total_flops().item() == sum(_flops(flop_counter, lambda: stage(x)))
    travels = {
        n.removeprefix("self_attn."): b
        for n, b in zip(cost.comms.name, cost.comms.bytes[:, 0], strict=True)
    }
    own, runs = spec.linear_attention, 1 if kind == "ulysses" else 2
    assert own is not None
    # Keys times values and keys times keys of every head and run, whatever the tokens.
    state = 2 * own.head_dim**2 * own.num_heads * (8 if dtype == "fp64" else 4)
    assert travels["state_context"] == 2 * runs * cp * state


@pytest.mark.parametrize("name", SPECS)
def test_tensor_and_context_parallel_ranks_share_the_work(name: str) -> None:
    spec = SPECS[name]
    for layer in range(-1, spec.num_layers + 1):
        whole = layer_cost(spec, layer, _shape(2, 64, "bf16"))
        for axis in ("tp", "cp"):
            shape = ShardShape(micro_batch_size=2, seq_len=64, **{axis: 2})
            part = layer_cost(spec, layer, shape)
            # States cross ranks by passes that one rank alone does not make.
            own = np.array([not n.endswith(_ACROSS) for n in part.ops.name])
            flops = (part.ops.flops * part.ops.count)[own].sum()
            assert flops * 2 == whole.ops.total_flops().item()
            assert (part.comms.count[[g == axis for g in part.comms.group]]).all()
    assert not layer_cost(spec, 0, _shape(2, 16, "bf16")).comms.count.any()


def test_candidates_in_one_pass_equal_each_alone() -> None:
    spec = load_model("kimi_k2")
    axes = {
        "micro_batch_size": [1, 2, 1, 4], "seq_len": [4096, 4096, 8192, 4096],
        "tp": [1, 2, 8, 1], "ep": [1, 16, 64, 8], "cp": [1, 1, 4, 2],
    }  # fmt: skip
    arrays = {k: np.array(v) for k, v in axes.items()}
    for layer in (-1, 0, 1, 61):
        together = layer_cost(spec, layer, ShardShape(**arrays), num_candidates=4)
        for i in range(4):
            alone = layer_cost(spec, layer, ShardShape(**{k: v[i] for k, v in axes.items()}))
            for table, column in (
                ("ops", "flops"), ("ops", "read_bytes"), ("ops", "written_bytes"), ("ops", "m"),
                ("ops", "batch"), ("lives", "bytes"), ("comms", "bytes"), ("comms", "count"),
            ):  # fmt: skip
                many = getattr(getattr(together, table), column)
                np.testing.assert_array_equal(
                    np.broadcast_to(many, (many.shape[0], 4))[:, i],
                    getattr(getattr(alone, table), column)[:, 0],
                )


def test_recompute_groups_are_on_rows_and_lives() -> None:
    cost = layer_cost(load_model("kimi_k2"), 1, ShardShape(seq_len=4096))
    groups = {"", "norm", "swiglu", "mla_up", "moe_down"}
    assert set(cost.lives.tag) == groups
    assert set(cost.ops.tag) == groups
    tagged = [Phase(p) for p, tag in zip(cost.ops.phase, cost.ops.tag, strict=True) if tag]
    assert set(tagged) == {Phase.FORWARD}
    by_tag = {
        tag: {n for n, t in zip(cost.lives.name, cost.lives.tag, strict=True) if t == tag}
        for tag in groups
    }
    assert by_tag["mla_up"] == {"self_attn.q", "self_attn.k", "self_attn.v"}
    assert by_tag["swiglu"] == {"mlp.experts.inner", "mlp.shared_experts.inner"}
    fp8 = {n for n, on in zip(cost.lives.name, cost.lives.fp8, strict=True) if on}
    assert fp8 == {
        "mlp.experts.input", "mlp.experts.gate_up", "mlp.shared_experts.gate_proj.out",
        "mlp.shared_experts.up_proj.out",
    }  # fmt: skip


def test_model_flops_equal_the_reporting_convention() -> None:
    """Executed FLOPs, backward's second score product taken off, are 6N plus attention."""
    from flopwright.spec.flops import model_flops_per_token

    spec, seq = load_model("kimi_k2"), 4096
    total = 0.0
    for layer in (-1, *[0], *[1] * 60, 61):
        ops = layer_cost(spec, layer, ShardShape(seq_len=seq)).ops
        attention = ops.kind == OpKind.ATTENTION
        total += ops.total_flops().item()
        forward = (ops.flops * ops.count)[attention & (ops.phase == Phase.FORWARD)].sum()
        total -= forward * 192 / (192 + 128)  # scores computed again in the backward pass
    # The convention counts seq^2 / 2 pairs where seq (seq + 1) / 2 are executed.
    assert total / seq == pytest.approx(model_flops_per_token(spec, seq), rel=1e-4)
