"""Every block under every shard and recompute policy: shares, traffic, what is run again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flopwright.executor.parallel.experts import _reorder
from flopwright.models.moe.dispatch import Dispatched
from flopwright.models.transformer.cost import layer_cost
from flopwright.models.transformer.module import build_stage, init_weights_
from flopwright.ops import BlockCost, Collective, Phase, ShardShape
from flopwright.plan.parallel import SELECTIVE_TAGS
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.blocks import Blocks, ShardCombos, price_blocks
from flopwright.simulator.training.candidates import RECOMPUTES
from flopwright.simulator.training.layers import representatives
from flopwright.spec.flops import hardware_flops_per_token, model_flops_per_token
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.model import GqaAttention, MlaAttention, Mlp, ModelSpec, Moe

BATCH, SEQ, BF16 = 2, 16, 2
TP, EP, CP = (1, 2, 4), (1, 2, 4), (1, 2)
MLA = MlaAttention(
    num_heads=4, q_lora_rank=12, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4,
    v_head_dim=5,
)  # fmt: skip
GQA = GqaAttention(num_heads=8, num_kv_heads=2, head_dim=6, qk_norm=True, bias=True)
MOE = Moe(num_experts=8, top_k=3, expert_intermediate_size=12, first_dense_layers=1)


def _spec(**changes: Any) -> ModelSpec:
    data: dict[str, Any] = {
        "name": "small",
        "hidden_size": 24,
        "num_layers": 2,
        "vocab_size": 64,
        "attention": MLA,
        "mlp": Mlp(intermediate_size=36),
    }
    return ModelSpec(**(data | changes))


SPECS = {
    "mla_moe_shared": _spec(moe=MOE.model_copy(update={"num_shared_experts": 2})),
    "mla_without_q_lora": _spec(attention=MLA.model_copy(update={"q_lora_rank": None})),
    "gqa_moe_softmax": _spec(attention=GQA, moe=MOE.model_copy(update={"router": "softmax"})),
    "gqa_window": _spec(attention=GQA.model_copy(update={"sliding_window": 5})),
    "moe_balance_loss": _spec(moe=MOE.model_copy(update={"sequence_balance_loss": 0.1})),
    "mha_gelu_layer_norm": _spec(
        attention=GqaAttention(
            num_heads=4, num_kv_heads=4, head_dim=6, rope=None, bias=True, o_bias=True
        ),
        mlp=Mlp(kind="gelu", intermediate_size=36, bias=True),
        norm="layer_norm", positions="learned", max_seq_len=32, tied_embeddings=True,
    ),
}  # fmt: skip
# What every rank of a tensor-parallel group keeps whole: gathered inputs of cut matrices,
# tokens and targets, one number a row of the loss, one number an expert.
WHOLE_OVER_TP = {
    "self_attn.q_a_layernorm.out", "self_attn.kv_a_layernorm.out", "tokens", "targets",
    "loss.lse", "mlp.experts.counts", "mlp.gate.fractions",
}  # fmt: skip
# Over a context group: only what has no token axis.
WHOLE_OVER_CP = {"mlp.experts.counts", "mlp.gate.fractions"}


def _cost(spec: ModelSpec, layer: int, **axes: int) -> BlockCost:
    return layer_cost(spec, layer, ShardShape(micro_batch_size=BATCH, seq_len=SEQ, **axes))


def _layers(spec: ModelSpec) -> range:
    return range(-1, spec.num_layers + 1)


def _flops(cost: BlockCost) -> np.ndarray:
    return (cost.ops.flops * cost.ops.count)[:, 0]


@pytest.mark.parametrize("name", SPECS)
def test_ranks_share_flops_and_kept_bytes(name: str) -> None:
    """A rank's rows times tp * cp equal the whole's, but for the rows named as replicated."""
    spec = SPECS[name]
    for layer, tp, cp in product(_layers(spec), TP, CP):
        whole, part = _cost(spec, layer), _cost(spec, layer, tp=tp, cp=cp)
        assert part.ops.name == whole.ops.name
        ranks = np.full(len(whole.ops), tp * cp, float)
        attn = spec.attention
        if isinstance(attn, GqaAttention) and tp > attn.num_kv_heads:
            # Fewer key heads than ranks: some compute and keep the same head.
            copied = [n in {"self_attn.k_proj", "self_attn.v_proj"} for n in whole.ops.name]
            ranks[copied] /= tp / attn.num_kv_heads
        np.testing.assert_allclose(_flops(part) * ranks, _flops(whole), rtol=1e-12)
        for i, life in enumerate(whole.lives.name):
            shares = (1 if life in WHOLE_OVER_TP else tp) * (1 if life in WHOLE_OVER_CP else cp)
            key = life.removeprefix("self_attn.").split(".")[0].split("_")[0] in {"k", "v"}
            if isinstance(attn, GqaAttention) and tp > attn.num_kv_heads and key:
                shares = shares * attn.num_kv_heads / tp
            assert part.lives.bytes[i, 0] * shares == pytest.approx(
                whole.lives.bytes[i, 0], rel=1e-12
            ), (life, tp, cp)


class _Neighbours:
    """Stands for the other ranks of an expert group at balanced load, without data.

    Rows are regrouped by the executor's own function: it keeps where they go.
    """

    def __init__(self, ep: int) -> None:
        self.ep = ep

    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        order, place = (counts.new_empty(rows.shape[0]) for _ in range(2))
        arrived = _reorder(rows.clone(), order, place)
        return Dispatched(arrived, counts.new_empty(counts.shape[0] // self.ep), (order, place))

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        order, place = handle
        return _reorder(rows, place, order).clone()


@pytest.mark.parametrize("ep", EP)
@pytest.mark.parametrize("name", [n for n, s in SPECS.items() if s.moe is not None])
def test_expert_parallel_ranks_execute_what_is_priced(
    name: str, ep: int, count_saved_bytes: Callable[..., Any], flop_counter: Callable[..., Any]
) -> None:
    """Each rank sends its rows away and receives as many: only weights and counts shrink.

    What it keeps beside is where the rows go that arrived.
    """
    spec = SPECS[name]
    whole, part = _cost(spec, 1), _cost(spec, 1, ep=ep)
    np.testing.assert_array_equal(_flops(part), _flops(whole))
    for i, life in enumerate(whole.lives.name):
        if life == "mlp.regroup.places":
            continue
        shrinks = ep if life == "mlp.experts.counts" else 1
        assert part.lives.bytes[i, 0] * shrinks == whole.lives.bytes[i, 0]
    stage = build_stage(
        spec, [1], dispatcher=_Neighbours(ep), ep_size=ep, ep_rank=ep - 1, device="meta",
        dtype=torch.bfloat16,
    )  # fmt: skip
    x = torch.empty(BATCH, SEQ, 24, dtype=torch.bfloat16, device="meta").requires_grad_()
    if ep > 1:  # at ep 1 the exchange's copy is not made
        found, _ = count_saved_bytes(stage, lambda: stage(x))
        assert part.lives.bytes.sum() == found
    with flop_counter() as counter:
        out = stage(x)
        out.backward(torch.empty_like(out))
    assert part.ops.total_flops().item() == counter.flops


def _traffic(cost: BlockCost, group: str, phase: Phase) -> list[tuple[Collective, float]]:
    c = cost.comms
    return [
        (Collective(c.collective[i]), float(c.bytes[i, 0]))
        for i in range(len(c))
        if c.group[i] == group and c.phase[i] == phase and c.count[i, 0]
    ]


@pytest.mark.parametrize("cp", CP)
@pytest.mark.parametrize("tp", [2, 4])
def test_tensor_parallel_traffic_of_a_dense_layer(tp: int, cp: int) -> None:
    """Sequence parallelism (arXiv 2205.05198): gather and reduce-scatter [tokens, hidden]
    around attention and around the feed-forward block, and back."""
    spec, state = load_model("llama31_8b"), BATCH * 4096 / cp * 4096 * BF16
    shape = ShardShape(micro_batch_size=BATCH, seq_len=4096, tp=tp, cp=cp)
    cost = layer_cost(spec, 0, shape)
    gather, scatter = (Collective.ALL_GATHER, state), (Collective.REDUCE_SCATTER, state)
    assert _traffic(cost, "tp", Phase.FORWARD) == [gather, scatter] * 2
    backward = _traffic(cost, "tp", Phase.BACKWARD_INPUT)
    assert sorted(backward) == sorted([gather, scatter] * 2)
    # The inputs that were not kept whole are gathered once more for the weights' gradients.
    assert _traffic(cost, "tp", Phase.BACKWARD_WEIGHT) == [gather] * 2


@pytest.mark.parametrize("tp", TP)
def test_context_parallel_traffic_is_keys_and_values(tp: int) -> None:
    for name, values in (("llama31_8b", 2 * 8 * 128), ("kimi_k2", 64 * (192 + 128))):
        shape = ShardShape(micro_batch_size=BATCH, seq_len=4096, tp=tp, cp=2)
        cost = layer_cost(load_model(name), 1, shape)
        whole = BATCH * 4096 * values / tp * BF16
        assert _traffic(cost, "cp", Phase.FORWARD) == [(Collective.ALL_GATHER, whole)]
        assert _traffic(cost, "cp", Phase.BACKWARD_INPUT) == [
            (Collective.ALL_GATHER, whole),
            (Collective.REDUCE_SCATTER, whole),
        ]


@pytest.mark.parametrize(("tp", "cp", "ep"), [(1, 1, 2), (1, 1, 16), (2, 1, 8), (2, 2, 384)])
def test_k2_exchange_is_114688_bytes_a_token_and_layer(tp: int, cp: int, ep: int) -> None:
    shape = ShardShape(seq_len=4096, tp=tp, cp=cp, ep=ep)
    cost = layer_cost(load_model("kimi_k2"), 1, shape)
    leaving = 114_688 * (4096 / tp / cp) * (ep - 1) / ep  # the rest stays on the rank
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        sent = _traffic(cost, "ep", phase)
        assert [kind for kind, _ in sent] == [Collective.ALL_TO_ALL] * 2  # dispatch, combine
        assert [nbytes for _, nbytes in sent] == pytest.approx([leaving] * 2)


@pytest.mark.parametrize("name", SPECS)
def test_one_rank_sends_nothing(name: str) -> None:
    for layer in _layers(SPECS[name]):
        assert not _cost(SPECS[name], layer).comms.count.any()


@pytest.mark.parametrize("name", SPECS)
def test_all_shards_in_one_pass_equal_each_alone(name: str) -> None:
    spec, grid = SPECS[name], list(product(TP, EP, CP))
    tp, ep, cp = (np.array(axis) for axis in zip(*grid, strict=True))
    shape = ShardShape(micro_batch_size=BATCH, seq_len=SEQ, tp=tp, ep=ep, cp=cp)
    for layer in _layers(spec):
        together = layer_cost(spec, layer, shape, len(grid))
        for i, (t, e, c) in enumerate(grid):
            alone = _cost(spec, layer, tp=t, ep=e, cp=c)
            for table in ("ops", "lives", "comms"):
                many, one = getattr(together, table), getattr(alone, table)
                for column in type(many).__dataclass_fields__:
                    values = getattr(many, column)
                    if isinstance(values, np.ndarray) and values.ndim == 2:
                        np.testing.assert_array_equal(values[:, i], getattr(one, column)[:, 0])
                    else:
                        assert np.array_equal(values, getattr(one, column))


def _priced(spec: ModelSpec, tp: int, ep: int, cp: int) -> Blocks:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    workload = scenario.workload.model_copy(update={"seq_len": SEQ})
    scenario = scenario.model_copy(update={"model": spec, "workload": workload})
    one = (np.array([float(v)]) for v in (BATCH, tp, ep, cp))
    mbs, tps, eps, cps = one
    combos = ShardCombos(micro_batch_size=mbs, tp=tps, ep=eps, cp=cps, index=np.zeros(1, int))
    return price_blocks(scenario, combos, default_calibration(scenario.cluster.node.gpu))


@pytest.mark.parametrize(("tp", "ep", "cp"), [(1, 1, 1), (2, 4, 1), (4, 2, 2)])
@pytest.mark.parametrize("name", SPECS)
def test_policies_drop_tagged_rows_and_run_them_again(
    name: str, tp: int, ep: int, cp: int
) -> None:
    spec = SPECS[name]
    blocks = _priced(spec, tp, ep, cp).tables
    none, selective, full = (RECOMPUTES.index(r) for r in ("none", "selective", "full"))
    for kind, layer in representatives(spec).items():
        cost, table = _cost(spec, layer, tp=tp, ep=ep, cp=cp), blocks[kind]
        forward = cost.ops.phase == Phase.FORWARD
        tagged = np.isin(cost.ops.tag, list(SELECTIVE_TAGS))
        assert not (tagged & ~forward).any()
        dropped = np.isin(cost.lives.tag, list(SELECTIVE_TAGS))
        kept = (table.saved_bytes + table.saved_fp8_bytes)[:, 0]
        flops = table.flops[:, 0]
        assert flops[none] == _flops(cost).sum()
        assert flops[selective] - flops[none] == pytest.approx(_flops(cost)[tagged].sum())
        assert kept[none] == cost.lives.bytes.sum()
        assert kept[none] - kept[selective] == cost.lives.bytes[dropped].sum()
        if 0 <= layer < spec.num_layers:
            assert flops[full] - flops[none] == pytest.approx(_flops(cost)[forward].sum())
            assert kept[full] == BATCH * SEQ / tp / cp * 24 * BF16
            again = [n for n, on in zip(cost.lives.name, dropped, strict=True) if on]
            assert again  # each kind has something that the policy drops
        else:  # the embeddings and the head are never run twice
            assert flops[full] == flops[none]
            assert kept[full] == kept[none]


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_run_again_executes_the_priced_forward(
    name: str, flop_counter: Callable[..., Any]
) -> None:
    spec = SPECS[name]
    for layer in range(spec.num_layers):
        stage = build_stage(spec, [layer])
        init_weights_(stage, spec, 0)
        x = torch.randn(BATCH, SEQ, 24).requires_grad_()
        out = checkpoint(stage, x, use_reentrant=False, preserve_rng_state=False)
        with flop_counter() as counter:
            out.backward(torch.ones_like(out))
        assert counter.flops == _cost(spec, layer).ops.total_flops().item()


@pytest.mark.parametrize(
    ("name", "seq", "convention", "gigaflop"),
    [
        ("llama31_8b", 8192, "causal_half", 51.5),
        ("llama31_8b", 8192, "full", 57.9),
        ("deepseek_v3", 4096, "causal_half", 249.6),
    ],
)
def test_reported_flops_of_published_runs(
    name: str, seq: int, convention: Any, gigaflop: float
) -> None:
    """Figures that public benchmark tables divide by; DeepSeek-V3 without its MTP layer."""
    found = model_flops_per_token(load_model(name), seq, convention) / 1e9
    assert found == pytest.approx(gigaflop, rel=0.005)


@pytest.mark.parametrize(("hidden", "layers"), [(12288, 96), (2048, 24)])
def test_hardware_flops_are_the_gpt_formula(hidden: int, layers: int) -> None:
    """96 B s l h^2 (1 + s / 6h + V / 16lh), arXiv 2104.04473; norms and biases left out."""
    seq, vocab = 2048, 51200
    spec = ModelSpec(
        name="gpt", hidden_size=hidden, num_layers=layers, vocab_size=vocab, max_seq_len=seq,
        positions="learned", tied_embeddings=True,
        mlp=Mlp(kind="gelu", intermediate_size=4 * hidden),
        attention=GqaAttention(
            num_heads=hidden // 128, num_kv_heads=hidden // 128, head_dim=128, rope=None
        ),
    )  # fmt: skip
    formula = 96 * layers * hidden**2
    formula *= 1 + seq / (6 * hidden) + vocab / (16 * layers * hidden)
    assert hardware_flops_per_token(spec, seq) == pytest.approx(formula, rel=1e-4)
    assert model_flops_per_token(spec, seq, "full") < 0.77 * formula


def test_executed_flops_are_another_figure() -> None:
    """Executed: pairs in sight, the diagonal too, and the scores once more in the backward."""
    spec, seq = load_model("llama31_8b"), 8192
    shape = ShardShape(seq_len=seq)
    costs = [layer_cost(spec, i, shape) for i in (-1, *[0] * 32, 32)]
    executed = sum(_flops(c).sum() for c in costs) / seq
    half = model_flops_per_token(spec, seq)
    weights = model_flops_per_token(spec, seq, "params_only")
    attention = (half - weights) * 7 / 6 * (seq + 1) / seq  # 7 products where 6 are reported
    # Norm weights count as parameters and multiply nothing on tensor cores.
    assert executed == pytest.approx(weights + attention, rel=1e-4)
    assert half < executed < model_flops_per_token(spec, seq, "full")
    again = sum(_flops(c)[c.ops.phase == Phase.FORWARD].sum() for c in costs[1:-1]) / seq
    recomputed = hardware_flops_per_token(spec, seq, "causal_half")
    assert recomputed - half == pytest.approx(again, rel=1e-3)


def test_the_worked_example_prints_what_the_docs_say() -> None:
    text = (Path(__file__).parents[3] / "docs" / "costs.md").read_text(encoding="utf-8")
    code = text.split("```python\n")[1].split("```")[0]
    printed = text.split("```text\n")[1].split("```")[0]
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout == printed
