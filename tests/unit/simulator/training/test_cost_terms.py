"""Each term of a step: what it adds, against closed forms and against the step without it."""

from typing import Any

import numpy as np
import pytest

from flopwright.ops import ShardShape
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.files import default_calibration, with_stack
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.blocks import price_blocks, shard_combos
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.kernels import KERNELS
from flopwright.simulator.training.predict import plan_costs, predict
from flopwright.simulator.training.stages import PipelineCosts
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import ExpertLoad

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
PRIOR = default_calibration(K2.cluster.node.gpu)
BARE = PRIOR.model_copy(update={"hidden_share": {}})
SEQ = 4096


def _scenario(model: str, **workload: Any) -> Scenario:
    spec = load_model(model)
    changed = K2.workload.model_copy(update={"global_batch_size": 128, "seq_len": SEQ} | workload)
    return K2.model_copy(update={"model": spec, "workload": changed})


LLAMA = _scenario("llama31_8b")
QWEN = _scenario("qwen3_30b_a3b")


def _with(calibration: Calibration, **fields: Any) -> Calibration:
    return calibration.model_copy(update=fields)


def _precision(scenario: Scenario, **fields: Any) -> Scenario:
    precision = scenario.workload.precision.model_copy(update=fields)
    workload = scenario.workload.model_copy(update={"precision": precision})
    return scenario.model_copy(update={"workload": workload})


def _workload(scenario: Scenario, **fields: Any) -> Scenario:
    workload = scenario.workload.model_copy(update=fields)
    return scenario.model_copy(update={"workload": workload})


def _step(scenario: Scenario, plan: ParallelPlan, calibration: Calibration = BARE) -> float:
    return float(evaluate(scenario, Candidates.from_plans([plan]), calibration).step_time_s[0])


def _costs(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration = BARE
) -> PipelineCosts:
    return plan_costs(scenario, plan, calibration)


PLAN = ParallelPlan(tp=2, pp=2, dp_shard=8, zero_stage=1)
MOE_PLAN = ParallelPlan(pp=2, dp_shard=16, ep=8, zero_stage=1)


# -- kernel classes ------------------------------------------------------------------------


def test_kernel_classes_are_all_of_the_compute() -> None:
    for scenario, plan in ((LLAMA, PLAN), (QWEN, MOE_PLAN)):
        for recompute in ("none", "selective", "full"):
            costs = _costs(scenario, plan.model_copy(update={"recompute": recompute}))
            compute = costs.forward["forward"] + costs.backward["backward"]
            compute = compute + costs.backward["recompute"]
            np.testing.assert_allclose(sum(costs.kernel_s.values()), compute, rtol=1e-12)
            assert set(costs.kernel_s) <= set(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_factor_scales_its_class_alone(kernel: str) -> None:
    scenario = _precision(QWEN, gemm="fp8_block")
    one = _costs(scenario, MOE_PLAN).kernel_s
    twice = _costs(scenario, MOE_PLAN, _with(BARE, kernel_factors={kernel: 2.0})).kernel_s
    assert one[kernel].any()
    for name, seconds in one.items():
        np.testing.assert_allclose(twice[name], seconds * (2.0 if name == kernel else 1.0))


def test_the_head_is_on_the_last_chunk_alone() -> None:
    head = _costs(LLAMA, PLAN).kernel_s["head"][:, 0]
    assert head[0] == 0 < head[1]


def test_an_odd_vocabulary_slows_the_head_and_padding_heals_it() -> None:
    model = LLAMA.model.model_copy(update={"vocab_size": 50257})
    odd = LLAMA.model_copy(update={"model": model})
    plain = ParallelPlan(dp_shard=8)
    stack = _with(BARE, kernel_factors={"odd": 3.0, "unaligned": 1.2})
    base, slow, padded = (
        _costs(odd, plain, c).kernel_s["head"][-1, 0]
        for c in (BARE, stack, _with(stack, pad_vocab_to=128))
    )
    assert base < padded < 1.001 * base
    assert 2.0 * base < slow < 3.0 * base  # the loss has no tiles


def test_widths_off_the_tile_cost_more_where_tp_cuts_them() -> None:
    model = load_model("llama31_8b").model_copy(
        update={"hidden_size": 14400, "name": "wide"}, deep=True
    )
    scenario = LLAMA.model_copy(update={"model": model})
    stack = _with(BARE, kernel_factors={"unaligned": 1.2})
    for tp, factor in ((1, 1.0), (8, 1.0)):
        plan = ParallelPlan(tp=tp, dp_shard=8)
        base, now = (_costs(scenario, plan, c).kernel_s["gemm"].sum() for c in (BARE, stack))
        assert now == pytest.approx(factor * base, rel=1e-9)
    # 14400 / 64 = 225: whole tiles; an inner width of 14336 over tp 7 heads is none.
    mlp = model.mlp.model_copy(update={"intermediate_size": 14400 * 4 + 8})
    ragged = scenario.model_copy(update={"model": model.model_copy(update={"mlp": mlp})})
    base, now = (
        _costs(ragged, ParallelPlan(dp_shard=8), c).kernel_s["gemm"].sum() for c in (BARE, stack)
    )
    assert 1.1 * base < now < 1.2 * base


# -- the host ------------------------------------------------------------------------------


def test_a_late_host_sets_the_pace_of_every_chunk() -> None:
    plan = ParallelPlan(pp=2, dp_shard=8)
    late = _with(BARE, layer_host_s={"dense": 1.0})
    costs = _costs(LLAMA, plan, late)
    np.testing.assert_allclose((costs.forward_s + costs.backward_s)[:, 0], [16.0, 16.0])
    m = plan.num_microbatches(128)
    assert _step(LLAMA, plan, late) == pytest.approx((m + 1) * 16.0, rel=0.01)
    prediction, _ = predict(LLAMA, plan, late)
    assert prediction.metrics.time_s["host"] > 0.5 * prediction.metrics.step_time_s


def test_an_early_host_costs_nothing() -> None:
    early = _with(BARE, layer_host_s={"dense": 1e-6, "moe": 1e-6})
    assert _step(LLAMA, PLAN, early) == _step(LLAMA, PLAN)


def test_full_recompute_launches_a_third_more() -> None:
    late = _with(BARE, layer_host_s={"dense": 1.0})
    plan = ParallelPlan(dp_shard=8, recompute="full")
    costs = _costs(LLAMA, plan, late)
    assert (costs.forward_s + costs.backward_s)[0, 0] == pytest.approx(32 * 4 / 3)


def test_the_constant_and_the_latency_of_many_ranks_are_added_once() -> None:
    base = _step(LLAMA, PLAN)
    assert _step(LLAMA, PLAN, _with(BARE, step_constant_s=2.0)) == pytest.approx(base + 2.0)
    slow = _with(BARE, data_parallel_latency_s=0.01)
    assert _step(LLAMA, PLAN, slow) == pytest.approx(base + 0.01 * 8)
    alone = ParallelPlan(tp=2, pp=2)
    assert _step(LLAMA, alone, slow) == _step(LLAMA, alone)


# -- overlap -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "scenario", "plan"),
    [
        ("tp_comm", LLAMA, PLAN),
        ("ep_comm", QWEN, MOE_PLAN),
        ("cp_comm", LLAMA, ParallelPlan(cp=4, dp_shard=8)),
        ("dp_comm", LLAMA, ParallelPlan(dp_shard=16, zero_stage=3)),
    ],
)
def test_a_hidden_share_leaves_the_rest(cls: str, scenario: Scenario, plan: ParallelPlan) -> None:
    def exposed(share: float, slowdown: float = 0.0) -> tuple[float, float]:
        stack = _with(BARE, hidden_share={cls: share}, overlap_slowdown={cls: slowdown})
        costs = _costs(scenario, plan, stack)
        sides = (costs.forward, costs.backward)
        comm = sum(float(s[cls].sum()) for s in sides if cls in s)
        return comm, float((costs.forward_s + costs.backward_s).sum())

    whole, total = exposed(0.0)
    half, shorter = exposed(0.5)
    assert whole > 0
    assert half == pytest.approx(0.5 * whole, rel=1e-9)
    assert shorter == pytest.approx(total - 0.5 * whole, rel=1e-9)
    assert exposed(0.5, slowdown=0.2)[1] == pytest.approx(total - 0.4 * whole, rel=1e-9)


def test_all_that_hides_fits_behind_the_compute_there_is() -> None:
    slow_link = LLAMA.cluster.node.link.model_copy(update={"bytes_per_s": 1e8})
    node = LLAMA.cluster.node.model_copy(update={"link": slow_link})
    scenario = LLAMA.model_copy(
        update={"cluster": LLAMA.cluster.model_copy(update={"node": node})}
    )
    everything = dict.fromkeys(("tp_comm", "cp_comm", "dp_comm"), 1.0)
    plan = ParallelPlan(tp=4, cp=2, dp_shard=2, zero_stage=3)
    raw = _costs(scenario, plan)
    hidden = _costs(scenario, plan, _with(BARE, hidden_share=everything))
    for mine, now in ((raw.forward, hidden.forward), (raw.backward, hidden.backward)):
        compute = sum(v for k, v in mine.items() if not k.endswith("_comm"))
        comm = sum(v for k, v in mine.items() if k.endswith("_comm"))
        np.testing.assert_allclose(sum(now.values()), np.maximum(compute, comm), rtol=1e-9)


def test_only_a_ring_hides_behind_attention() -> None:
    stack = _with(BARE, hidden_share={"cp_comm": 1.0})

    def seconds(kind: str) -> float:
        plan = ParallelPlan(cp=4, dp_shard=8, context_parallel=kind)
        costs = _costs(LLAMA, plan, stack)
        return float(costs.forward["cp_comm"].sum())

    assert seconds("ring") == 0.0
    assert seconds("all_gather") > 0.0
    assert seconds("ulysses") > 0.0


# -- parallel choices ----------------------------------------------------------------------


def test_an_all_reduce_is_a_scatter_and_a_gather() -> None:
    """Without sequence parallelism the same bytes travel, but the weight's gather is spared."""
    with_it = _costs(LLAMA, PLAN).comm_bytes["tp"].sum()
    plan = PLAN.model_copy(update={"sequence_parallel": False})
    without = _costs(LLAMA, plan)
    hidden = LLAMA.model.hidden_size * SEQ * 2
    gathers_again = 2 * 32 * hidden  # q, k, v and gate, up; the head's is one more
    # An all-reduce of n counts as n, its two halves as n each.
    expected = (with_it - gathers_again - hidden) / 2
    assert without.comm_bytes["tp"].sum() == pytest.approx(expected, rel=0.02)
    assert (without.saved_bytes > _costs(LLAMA, PLAN).saved_bytes).all()
    assert without.send_bytes[0] == 2 * _costs(LLAMA, PLAN).send_bytes[0]


def test_expert_shards_do_the_same_work_and_share_its_rows() -> None:
    """etp cuts each expert's width and gathers rows: FLOPs stay, weights are cut by ep * etp."""
    base = _costs(QWEN, ParallelPlan(dp_shard=16, ep=8))
    cut = _costs(QWEN, ParallelPlan(dp_shard=16, ep=4, etp=2))
    np.testing.assert_allclose(cut.flops, base.flops)
    np.testing.assert_allclose(cut.params.expert, base.params.expert)
    moe = QWEN.model.moe
    assert moe is not None
    rows = SEQ * moe.top_k * QWEN.model.hidden_size * 2 * 2  # bf16, of both ranks
    assert cut.comm_bytes["etp"].sum() == pytest.approx(4 * rows * QWEN.model.num_layers)


def test_ulysses_sends_four_tensors_where_a_ring_sends_two() -> None:
    cp, m = 4, LLAMA.model
    costs = _costs(LLAMA, ParallelPlan(cp=cp, dp_shard=8, context_parallel="ulysses"))
    attn = m.attention
    heads = 2 * attn.num_heads + 2 * attn.num_kv_heads  # type: ignore[union-attr]
    tokens = SEQ / cp
    leaving = tokens * heads * attn.qk_head_dim * 2 * (cp - 1) / cp
    assert costs.comm_bytes["cp"].sum() == pytest.approx(2 * leaving * m.num_layers)
    ring = _costs(LLAMA, ParallelPlan(cp=cp, dp_shard=8))
    kv = 2 * SEQ * attn.num_kv_heads * attn.qk_head_dim * 2  # type: ignore[union-attr]
    assert ring.comm_bytes["cp"].sum() == pytest.approx(3 * kv * m.num_layers)
    np.testing.assert_allclose(costs.flops, ring.flops)


def test_replicas_of_a_shard_group_gather_less_far() -> None:
    """Weights are gathered inside the node of 8 only; gradients cross once a step."""
    whole = _costs(LLAMA, ParallelPlan(dp_shard=64, zero_stage=3))
    hybrid = _costs(LLAMA, ParallelPlan(dp_shard=8, dp_replicate=8, zero_stage=3))
    assert hybrid.forward["dp_comm"].sum() < 0.95 * whole.forward["dp_comm"].sum()
    assert whole.end.reduce_s.sum() == 0 < hybrid.end.reduce_s.sum()


def test_gathers_of_weights_run_in_the_forward_too() -> None:
    costs = _costs(LLAMA, ParallelPlan(dp_shard=16, zero_stage=3))
    np.testing.assert_allclose(
        costs.backward["dp_comm"] - costs.forward["dp_comm"],
        2 * costs.forward["dp_comm"],  # gradients are twice as wide as weights
        rtol=0.05,
    )


# -- recompute -----------------------------------------------------------------------------


def test_full_recompute_by_depth_is_between_none_and_all() -> None:
    def kept(layers: int | None, recompute: str = "full") -> tuple[float, float]:
        plan = ParallelPlan(dp_shard=8, recompute=recompute, recompute_layers=layers)
        costs = _costs(LLAMA, plan)
        return float(costs.saved_bytes.sum()), float(costs.backward["recompute"].sum())

    none, full = kept(None, "none"), kept(None)
    for layers in (0, 8, 32, 40):
        share = min(layers, 32) / 32
        bytes_, seconds = kept(layers)
        fp8 = 0.0
        assert bytes_ + fp8 == pytest.approx(none[0] + share * (full[0] - none[0]), rel=1e-9)
        assert seconds == pytest.approx(share * full[1], rel=1e-9)


def test_several_depths_are_priced_together_as_each_alone() -> None:
    several = [
        ParallelPlan(dp_shard=8, recompute="full", recompute_layers=n) for n in (0, 3, 9)
    ] + [
        ParallelPlan(dp_shard=8, recompute="selective", recompute_tags=tags)
        for tags in (("norm",), ("mlp", "norm"), ("core_attn",))
    ]
    found = evaluate(LLAMA, Candidates.from_plans(several), BARE)
    candidates = Candidates.from_plans(several)
    assert [candidates.plan(i) for i in range(len(several))] == several
    for i, plan in enumerate(several):
        alone = evaluate(LLAMA, Candidates.from_plans([plan]), BARE)
        assert found.step_time_s[i] == alone.step_time_s[0]
        assert found.peak_bytes[i] == alone.peak_bytes[0]


@pytest.mark.parametrize(
    ("tags", "smaller"),
    [
        (("norm",), ("norm", "swiglu")),
        (("act",), ("mlp",)),
        (("core_attn",), ("core_attn", "norm")),
    ],
)
def test_longer_lists_keep_less_and_take_longer(
    tags: tuple[str, ...], smaller: tuple[str, ...]
) -> None:
    def of(chosen: tuple[str, ...]) -> tuple[float, float]:
        plan = ParallelPlan(dp_shard=8, recompute="selective", recompute_tags=chosen)
        costs = _costs(LLAMA, plan)
        kept = float((costs.saved_bytes + costs.saved_fp8_bytes).sum())
        return kept, float(costs.backward["recompute"].sum())

    none = _costs(LLAMA, ParallelPlan(dp_shard=8))
    everything = float((none.saved_bytes + none.saved_fp8_bytes).sum())
    assert everything > of(tags)[0] > of(smaller)[0]
    assert 0 < of(tags)[1] < of(smaller)[1]


def test_the_standard_list_written_out_is_the_standard_policy() -> None:
    listed = MOE_PLAN.model_copy(
        update={"recompute": "selective", "recompute_tags": ("norm", "swiglu", "mla_up")}
    )
    named = MOE_PLAN.model_copy(update={"recompute": "selective"})
    assert _step(QWEN, listed) == _step(QWEN, named)
    assert listed.label() != named.label()


def test_a_block_run_again_repeats_its_exchanges() -> None:
    plan = MOE_PLAN.model_copy(update={"recompute": "selective", "recompute_tags": ("moe",)})
    once, twice = _costs(QWEN, MOE_PLAN), _costs(QWEN, plan)
    np.testing.assert_allclose(twice.comm_bytes["ep"], 1.5 * once.comm_bytes["ep"])
    np.testing.assert_allclose(
        twice.backward["ep_comm"] - once.backward["ep_comm"], once.forward["ep_comm"]
    )


# -- attention without a fused kernel ------------------------------------------------------


def test_unfused_attention_keeps_the_square_and_moves_it() -> None:
    unfused = _with(BARE, attention_kernel="unfused")
    plan = ParallelPlan(dp_shard=8)
    fused, plain = _costs(LLAMA, plan), _costs(LLAMA, plan, unfused)
    heads, layers = LLAMA.model.attention.num_heads, LLAMA.model.num_layers
    softmax = SEQ * SEQ * heads * 2 * layers
    lse = SEQ * heads * 4 * layers
    more = float((plain.saved_bytes - fused.saved_bytes).sum())
    assert more == pytest.approx(softmax - lse)
    moved = 5 * SEQ * SEQ * heads * 2 * layers / LLAMA.cluster.node.gpu.hbm_bytes_per_s
    classes = ("attention", "attention_backward")
    found = sum(float(plain.kernel_s[c].sum()) for c in classes)
    assert found > moved  # never faster than its bytes
    assert found > 1.5 * sum(float(fused.kernel_s[c].sum()) for c in classes)
    dropped = plan.model_copy(update={"recompute": "selective", "recompute_tags": ("core_attn",)})
    kept = float(_costs(LLAMA, dropped, unfused).saved_bytes.sum())
    assert kept == pytest.approx(float(plain.saved_bytes.sum()) - softmax)


# -- formats -------------------------------------------------------------------------------


def test_fp8_products_are_faster_and_their_casts_are_not_free() -> None:
    plan = ParallelPlan(dp_shard=8)
    wide = _costs(LLAMA, plan)
    for recipe in ("fp8_tensor", "fp8_block", "mxfp8"):
        narrow = _costs(_precision(LLAMA, gemm=recipe), plan)
        assert narrow.kernel_s["gemm"].sum() < wide.kernel_s["gemm"].sum()
        assert narrow.kernel_s["quantize"].sum() > 0
        assert narrow.kernel_s["head"].sum() == wide.kernel_s["head"].sum()
        assert narrow.saved_bytes.sum() < wide.saved_bytes.sum()
        np.testing.assert_allclose(narrow.flops, wide.flops)


def test_casts_read_each_input_once() -> None:
    """Inputs: x, the result of attention, x again, the inner state; and all gradients."""
    scenario = _precision(LLAMA, gemm="fp8_tensor")
    costs = _costs(scenario, ParallelPlan(dp_shard=8))
    m = LLAMA.model
    attn, inner = m.attention, m.mlp.intermediate_size
    kv = 2 * attn.num_kv_heads * attn.qk_head_dim  # type: ignore[union-attr]
    inputs = m.hidden_size + attn.num_heads * attn.qk_head_dim + m.hidden_size + inner
    outputs = attn.num_heads * attn.qk_head_dim + kv + m.hidden_size + 2 * inner + m.hidden_size
    nbytes = SEQ * (inputs + outputs) * (2 + 2 * 1) * m.num_layers
    floor = nbytes / LLAMA.cluster.node.gpu.hbm_bytes_per_s
    assert floor < costs.kernel_s["quantize"].sum() < 3 * floor


# -- adapters ------------------------------------------------------------------------------


def test_adapters_train_few_weights_and_skip_the_weight_gradients() -> None:
    rank = 16
    lora = _workload(LLAMA, lora_rank=rank)
    plan = ParallelPlan(dp_shard=8, zero_stage=1)
    whole, few = _costs(LLAMA, plan), _costs(lora, plan)
    m = LLAMA.model
    kv = m.attention.num_kv_heads * m.attention.qk_head_dim  # type: ignore[union-attr]
    sides = [(m.hidden_size, m.hidden_size)] * 2 + [(m.hidden_size, kv)] * 2
    sides += [(m.hidden_size, m.mlp.intermediate_size)] * 3
    expected = rank * sum(a + b for a, b in sides) * m.num_layers
    assert few.params.dense.sum() == expected
    assert few.params.held.sum() == whole.params.held.sum() + expected
    assert few.end.reduce_s.sum() < 0.02 * whole.end.reduce_s.sum()
    assert few.end.update_s.sum() < 0.02 * whole.end.update_s.sum()
    assert few.weight_s.sum() < 0.15 * whole.weight_s.sum()
    assert 0.6 < few.flops.sum() / whole.flops.sum() < 0.72


# -- routing -------------------------------------------------------------------------------


def test_uneven_experts_wait_for_the_busiest_rank() -> None:
    def step(load: ExpertLoad) -> float:
        return _step(_workload(QWEN, expert_load=load), MOE_PLAN)

    even = step(ExpertLoad())
    skewed = [step(ExpertLoad(kind="power_law", exponent=a)) for a in (0.0, 0.3, 0.6, 1.0)]
    assert skewed[0] == pytest.approx(even)
    assert np.all(np.diff(skewed) > 0)
    few, all_of_them = (
        step(ExpertLoad(kind="power_law", exponent=1.0, redundant_experts=n)) for n in (8, 128)
    )
    assert even < few < 1.05 * even < skewed[-1]
    assert all_of_them == pytest.approx(even)  # as many copies as experts balance anything


def test_capacity_pads_every_expert() -> None:
    def costs(factor: float) -> PipelineCosts:
        load = ExpertLoad(kind="capacity", capacity_factor=factor)
        return _costs(_workload(QWEN, expert_load=load), MOE_PLAN)

    one, more = costs(1.0), costs(1.25)
    assert _step(QWEN, MOE_PLAN) == _step(
        _workload(QWEN, expert_load=ExpertLoad(kind="capacity")), MOE_PLAN
    )
    grouped = more.kernel_s["grouped_gemm"].sum() / one.kernel_s["grouped_gemm"].sum()
    assert 1.1 < grouped < 1.26
    assert more.forward["ep_comm"].sum() > 1.15 * one.forward["ep_comm"].sum()


# -- further tokens ------------------------------------------------------------------------


def test_a_prediction_module_is_a_layer_and_a_head_more() -> None:
    model = QWEN.model.model_copy(update={"mtp_layers": 1})
    more = _costs(QWEN.model_copy(update={"model": model}), MOE_PLAN)
    base = _costs(QWEN, MOE_PLAN)
    assert more.flops[0, 0] == base.flops[0, 0]
    hidden = QWEN.model.hidden_size
    products = 6 * SEQ * 2 * hidden * hidden
    layer = base.flops[0, 0] / 24
    head = 6 * (SEQ - 1) * QWEN.model.vocab_size * hidden  # the last token has none behind it
    assert more.flops[1, 0] - base.flops[1, 0] == pytest.approx(products + layer + head, rel=1e-9)
    shorter = _costs(_workload(QWEN, seq_len=SEQ - 1), MOE_PLAN)
    heads = base.kernel_s["head"][1, 0] + shorter.kernel_s["head"][1, 0]
    assert more.kernel_s["head"][1, 0] == pytest.approx(heads, rel=1e-9)
    assert more.params.dense[1, 0] > base.params.dense[1, 0]


# -- traffic to the host -------------------------------------------------------------------


def test_shards_on_the_host_travel_every_micro_batch() -> None:
    base = ParallelPlan(dp_shard=8, zero_stage=3, optimizer_offload=True)
    slow = K2.cluster.node.host_link
    assert slow is not None
    node = LLAMA.cluster.node.model_copy(
        update={"host_link": slow.model_copy(update={"bytes_per_s": 1e9})}
    )
    scenario = LLAMA.model_copy(
        update={"cluster": LLAMA.cluster.model_copy(update={"node": node})}
    )
    bytes_of_weights = _costs(scenario, base).params.dense.sum() / 8 * 2
    weights = _costs(scenario, base.model_copy(update={"parameter_offload": True}))
    compute = _costs(scenario, base)
    expected = bytes_of_weights / 1e9 + slow.latency_s - compute.forward_s[0, 0]
    assert weights.forward["offload"][0, 0] == pytest.approx(expected, rel=1e-6)
    both = base.model_copy(update={"parameter_offload": True, "gradient_offload": True})
    gradients = _costs(scenario, both)
    assert gradients.backward["offload"][0, 0] > weights.backward["offload"][0, 0]


# -- a stack over a prior ------------------------------------------------------------------


def test_a_stack_replaces_what_it_gives_and_keeps_the_rest() -> None:
    stack = Calibration(
        id="stack", created="2026-11-29", source="a stack", kernel_factors={"gemm": 1.1},
        hidden_share={"tp_comm": 0.5}, layer_host_s={"moe": 0.009}, pad_vocab_to=128,
    )  # fmt: skip
    found = with_stack(PRIOR, stack)
    assert found.curves == PRIOR.curves
    assert found.hidden_share == PRIOR.hidden_share | {"tp_comm": 0.5}
    assert (found.kernel_factors, found.pad_vocab_to) == ({"gemm": 1.1}, 128)
    assert found.step_residual_log == PRIOR.step_residual_log
    assert found.id == f"{PRIOR.id}+stack"
    assert with_stack(PRIOR, Calibration(id="n", created="", source="")).curves == PRIOR.curves


def test_neutral_fields_change_nothing() -> None:
    neutral = with_stack(PRIOR, Calibration(id="n", created="", source=""))
    for scenario, plan in ((LLAMA, PLAN), (QWEN, MOE_PLAN)):
        assert _step(scenario, plan, neutral) == _step(scenario, plan, PRIOR)


def test_shapes_are_the_neutral_ones_without_a_stack() -> None:
    combos = shard_combos(Candidates.from_plans([PLAN]))
    blocks = price_blocks(LLAMA, combos, BARE)
    assert ShardShape().attention_kernel == "flash"
    assert set(blocks.tables) == {"embedding", "dense", "head"}


# -- what a prediction says ----------------------------------------------------------------


def test_a_prediction_reports_every_convention() -> None:
    """Llama 3 8B at 8192: 51.5 GFLOP a token at half the square, 57.9 with all of it."""
    scenario = _scenario("llama31_8b", seq_len=8192)
    prediction, _ = predict(scenario, PLAN, BARE)
    rate = prediction.metrics.tokens_per_s_per_gpu
    found = {k: v / rate / 1e9 for k, v in prediction.flops_per_s_per_gpu.items()}
    assert found["causal_half"] == pytest.approx(51.5, rel=0.005)
    assert found["full"] == pytest.approx(57.9, rel=0.005)
    layers = found["full"] - 6 * 4096 * 128256 / 1e9
    assert found["full_recompute"] == pytest.approx(found["full"] + layers / 3, rel=0.005)
    assert prediction.metrics.model_flops_per_s_per_gpu == pytest.approx(
        prediction.flops_per_s_per_gpu["causal_half"]
    )


def test_a_prediction_says_what_it_takes_for_granted() -> None:
    load = ExpertLoad(kind="power_law", exponent=0.5)
    model = QWEN.model.model_copy(update={"mtp_layers": 1})
    scenario = _workload(
        _precision(QWEN.model_copy(update={"model": model}), gemm="fp8_block"),
        expert_load=load,
        lora_rank=8,
    )
    stack = _with(
        BARE,
        layer_host_s={"moe": 0.009},
        attention_kernel="unfused",
        hidden_share={"ep_comm": 0.3},
    )
    prediction, _ = predict(scenario, MOE_PLAN, stack)
    said = " | ".join(prediction.assumptions)
    for word in ("i^-0.5", "9 ms a moe layer", "separate kernels", "fp8_block", "rank 8", "30%"):
        assert word in said
    assert "prediction modules" in said
    assert "chosen evenly" not in said
