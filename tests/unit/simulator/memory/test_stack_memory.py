"""Memory on public software stacks, against closed forms that nobody here wrote."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.ops import ShardShape
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.memory.profile import PROFILES, load_profile, profile_of
from flopwright.simulator.memory.stack_lives import kept_bytes, stack_lives
from flopwright.simulator.memory.stack_memory import StackMemory, stack_memory, workspace_bytes
from flopwright.spec.from_columns import model_from_columns
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.parameters import num_params, parameters
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import ExpertLoad, Optimizer, Precision

BASE = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
GPT = model_from_columns(hidden=1024, layers=8, heads=16, vocab=51_200, ffn=4096).spec
LLAMA = load_model("llama31_8b")
MEGATRON = load_profile("megatron")
S, B, H, A = 2048, 2, 1024, 16


def _scenario(model: Any = LLAMA, seq_len: int = S, batch: int = 64, **work: Any) -> Scenario:
    changes = {
        "seq_len": seq_len,
        "global_batch_size": batch,
        "optimizer": Optimizer(),
        "precision": Precision(),
    }
    workload = BASE.workload.model_copy(update=changes | work)
    return BASE.model_copy(update={"model": model, "workload": workload})


def _peak(plan: ParallelPlan, profile: Any = MEGATRON, **scenario: Any) -> float:
    return float(stack_memory(_scenario(**scenario), plan, profile).allocated.max())


def _layer_bytes(tp: int, sequence_parallel: bool, attention: str, **policy: Any) -> float:
    """One GPT layer without the statistics of its norms, which the formula leaves out."""
    profile = MEGATRON.model_copy(update={"attention": attention})
    shape = ShardShape(
        micro_batch_size=B, seq_len=S, tp=tp, sequence_parallel=sequence_parallel, dtype="bf16"
    )
    lives = stack_lives(GPT, 0, shape, profile)
    small = [lives.bytes[i, 0] for i, n in enumerate(lives.name) if n.endswith("statistics")]
    kept = float(kept_bytes(lives, ParallelPlan(tp=tp, **policy), profile, "dense").kept[0])
    return kept - (0.0 if policy.get("recompute") == "full" else sum(small))


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_gpt_layer_keeps_what_korthikanti_count(tp: int) -> None:
    """arXiv 2205.05198: sbh (34 + 5as/h) / t with sequence parallelism, equation 4, and
    sbh (10 + 24/t + 5as/(ht)) without, equation 2."""
    sbh, scores = S * B * H, 5 * A * S / H
    assert _layer_bytes(tp, True, "unfused") == pytest.approx(sbh / tp * (34 + scores))
    assert _layer_bytes(tp, False, "unfused") == pytest.approx(sbh * (10 + 24 / tp + scores / tp))


def test_recomputing_the_core_of_attention_leaves_34_sbh() -> None:
    """Section 5: what is dropped is 5 a s^2 b, to the byte; of everything but the input 2 sbh."""
    core = {"recompute": "selective", "recompute_tags": ("core_attn",)}
    assert _layer_bytes(1, True, "unfused", **core) == pytest.approx(34 * S * B * H)
    assert _layer_bytes(1, True, "unfused", recompute="full") == 2 * S * B * H


def test_a_fused_kernel_keeps_one_number_a_query_and_head() -> None:
    lse = 4 * S * B * A
    assert _layer_bytes(1, True, "flash") == pytest.approx(34 * S * B * H + lse)


def test_a_llama_layer_keeps_8h_4q_4kv_6f() -> None:
    shape = ShardShape(micro_batch_size=1, seq_len=1, dtype="bf16")
    lives = stack_lives(LLAMA, 0, shape, MEGATRON)
    q, kv = 32 * 128, 8 * 128
    wanted = 8 * 4096 + 4 * q + 4 * kv + 6 * 14336
    statistics = 4 * 32 + 2 * 4  # attention's log-sum-exp, two norms' scales
    assert lives.bytes.sum() == wanted + statistics


def _states(memory: StackMemory) -> float:
    held = (memory.classes[c] for c in ("weights", "gradients", "optimizer_state"))
    return float(np.asarray(sum(held)).sum())


def test_mixed_precision_takes_18_bytes_a_number() -> None:
    memory = stack_memory(_scenario(), ParallelPlan(micro_batch_size=1), MEGATRON)
    assert _states(memory) == pytest.approx(18 * num_params(LLAMA), rel=1e-6)


@pytest.mark.parametrize("dp", [2, 16])
def test_the_distributed_optimizer_takes_6_and_12_over_dp(dp: int) -> None:
    plan = ParallelPlan(dp_shard=dp, zero_stage=1)
    memory = stack_memory(_scenario(), plan, MEGATRON)
    assert _states(memory) == pytest.approx((6 + 12 / dp) * num_params(LLAMA), rel=1e-6)


def test_sharded_fp32_training_takes_16_bytes_over_the_ranks() -> None:
    plan = ParallelPlan(dp_shard=8, zero_stage=3, data_parallel="fsdp2")
    memory = stack_memory(_scenario(), plan, load_profile("torchtitan"))
    bytes_a_number = memory.resident[0] / num_params(LLAMA)
    assert bytes_a_number == pytest.approx(16 / 8, rel=0.01)  # and two workspaces


def test_muon_keeps_one_number_a_matrix() -> None:
    adam, muon = (
        stack_memory(_scenario(optimizer=Optimizer(kind=k)), ParallelPlan(), MEGATRON)
        for k in ("adamw", "muon")
    )
    matrices = sum(p.numel for p in parameters(LLAMA) if p.is_matrix)
    saved = adam.classes["optimizer_state"] - muon.classes["optimizer_state"]
    assert saved[0] == 4 * matrices


def test_logits_stand_in_six_bytes_and_in_fourteen() -> None:
    """What the loss adds over a loss in thousands of pieces is the logits' bytes."""
    tokens = 8 * S
    plan = ParallelPlan(micro_batch_size=8, recompute="full")
    for name in ("megatron", "torchtitan"):
        profile = load_profile(name).model_copy(
            update={"weight_gradients": "fused", "pad_vocab_to": 1}
        )
        pieces = profile.model_copy(update={"loss_chunks": 1024})
        whole, cut = (stack_memory(_scenario(), plan, p).classes for p in (profile, pieces))
        held = [c["activations"] + c["temporaries"] for c in (whole, cut)]
        logits = tokens * LLAMA.vocab_size * profile.logit_bytes
        assert held[0][0] - held[1][0] <= logits
        assert held[0][0] >= logits


def test_a_loss_in_pieces_keeps_none_of_the_logits_whole() -> None:
    titan = load_profile("torchtitan")
    plan = ParallelPlan(micro_batch_size=8, recompute="full")
    peaks = [_peak(plan, titan.model_copy(update={"loss_chunks": n})) for n in (1, 2, 8, 64)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[1]


def test_interleaving_holds_its_published_number_of_chunks() -> None:
    """On the last rank (v - 1) p + 1 chunks of 1 / (p v) of the layers (arXiv 2104.04473)."""
    scenario = _scenario(model=GPT, batch=64)
    p, v = 2, 4
    plan = ParallelPlan(pp=p, vpp=v, schedule="interleaved_1f1b")
    flash = MEGATRON.model_copy(update={"kept_logit_bytes": 0.0, "dropout": False})
    held = stack_memory(scenario, plan, flash).classes["activations"][-1]
    one = stack_memory(scenario, ParallelPlan(pp=p), flash).classes["activations"][-1]
    layers = GPT.num_layers / p
    assert held / one == pytest.approx(((v - 1) * p + 1) / v * layers / layers, rel=0.03)


def test_recompute_by_depth_drops_as_many_layers_as_it_says() -> None:
    held = [
        stack_memory(
            _scenario(), ParallelPlan(recompute="full", recompute_layers=n), MEGATRON
        ).classes["activations"][0]
        for n in (0, 1, 5, 32)
    ]
    nothing = stack_memory(_scenario(), ParallelPlan(), MEGATRON).classes["activations"][0]
    one = (held[0] - held[3]) / 32
    assert held[0] == nothing
    assert held[0] - held[1] == pytest.approx(one)
    assert held[0] - held[2] == pytest.approx(5 * one)


def test_placeholders_are_one_tensor_a_shape() -> None:
    on, off = (
        stack_memory(_scenario(), ParallelPlan(recompute="full"), p).resident[0]
        for p in (MEGATRON, MEGATRON.model_copy(update={"weight_gradients": "fused"}))
    )
    q, kv, f = 4096, 1024, 14336
    shapes = 4096 * (q + 2 * kv) + q * 4096 + 2 * 4096 * f + f * 4096
    assert on - off == 2 * shapes


def test_moments_come_with_the_first_update() -> None:
    """Until then they are missing; at the update activations are gone."""
    full = stack_memory(_scenario(), ParallelPlan(micro_batch_size=8), MEGATRON)
    moments = 8 * num_params(LLAMA)
    assert (full.allocated - full.first_step)[0] == pytest.approx(moments, rel=1e-6)
    small = stack_memory(_scenario(), ParallelPlan(recompute="full"), MEGATRON)
    assert small.first_step == pytest.approx(small.resident)
    assert small.first_step[0] > small.allocated[0] - moments


@pytest.mark.parametrize("flag", ["parameter_offload", "gradient_offload", "optimizer_offload"])
def test_what_moves_to_the_host_is_counted_there(flag: str) -> None:
    plan = ParallelPlan(dp_shard=4, zero_stage=3)
    profile = load_profile("fsdp2")
    on, off = (
        stack_memory(_scenario(), plan.model_copy(update={flag: x}), profile)
        for x in (True, False)
    )
    assert off.host[0] == 0
    assert off.resident[0] - on.resident[0] == pytest.approx(on.host[0])
    assert on.host[0] >= num_params(LLAMA)


def test_a_flat_update_stands_beside_what_the_allocator_cached() -> None:
    profile = load_profile("megatron_deepspeed")
    memory = stack_memory(_scenario(), ParallelPlan(zero_stage=1), profile)
    plain = stack_memory(
        _scenario(), ParallelPlan(zero_stage=1), profile.model_copy(update={"flat_update": False})
    )
    assert (memory.held > memory.allocated).all()
    assert plain.held == pytest.approx(plain.allocated)


def test_gradients_of_a_single_micro_batch_come_as_activations_go() -> None:
    profile = load_profile("torchtune")
    one, two = (
        stack_memory(_scenario(batch=n * 8), ParallelPlan(micro_batch_size=8), profile)
        for n in (1, 2)
    )
    assert one.classes["gradients"][0] == 0
    assert two.classes["gradients"][0] == 2 * num_params(LLAMA)


def test_adapters_train_little_and_keep_frozen_weights_in_fp8() -> None:
    precision = Precision(gemm="fp8_tensor", frozen_weights="fp8")
    profile = load_profile("megatron_bridge")
    plan = ParallelPlan(micro_batch_size=1)
    memory = stack_memory(_scenario(lora_rank=16, precision=precision), plan, profile)
    tables = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    frozen = num_params(LLAMA) + tables  # a byte each, the tables two
    assert memory.classes["weights"][0] == pytest.approx(frozen, rel=0.01)
    assert memory.classes["optimizer_state"][0] < 0.01 * 12 * num_params(LLAMA)


def test_offloaded_activations_leave_two_micro_batches() -> None:
    plan = ParallelPlan(pp=8, micro_batch_size=1)
    on, off = (
        stack_memory(_scenario(), plan.model_copy(update={"activation_offload": x}), MEGATRON)
        for x in (True, False)
    )
    assert on.classes["activations"][0] == pytest.approx(
        off.classes["activations"][0] * 2 / 8, rel=1e-6
    )
    moved = off.classes["activations"] - on.classes["activations"]
    assert on.host[0] == pytest.approx(moved[0])


def test_skewed_routing_fills_the_busiest_rank() -> None:
    moe = load_model("qwen3_30b_a3b")
    plan = ParallelPlan(dp_shard=16, ep=16, zero_stage=1)
    loads = [ExpertLoad(), *(ExpertLoad(kind="power_law", exponent=x) for x in (0.5, 1.0))]
    peaks = [
        stack_memory(_scenario(model=moe, expert_load=x), plan, MEGATRON).allocated[0]
        for x in loads
    ]
    assert peaks == sorted(peaks)
    assert peaks[0] < peaks[2]


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 2, 8]),
    mbs=st.sampled_from([1, 2]),
    name=st.sampled_from(sorted(p.stem for p in PROFILES.glob("*.yaml"))),
    tags=st.sets(st.sampled_from(["norm", "core_attn", "act", "mlp"]), min_size=1),
)
def test_more_recompute_never_takes_more(
    pp: int, tp: int, mbs: int, name: str, tags: set[str]
) -> None:
    profile = load_profile(name)
    base = {"pp": pp, "tp": tp, "micro_batch_size": mbs}
    few, all_tags = tuple(sorted(tags))[:1], tuple(sorted(tags))
    peaks = [
        _peak(ParallelPlan(**base, **policy), profile)
        for policy in (
            {"recompute": "none"},
            {"recompute": "selective", "recompute_tags": few},
            {"recompute": "selective", "recompute_tags": all_tags},
        )
    ]
    whole = [
        stack_memory(
            _scenario(), ParallelPlan(**base, recompute="full", recompute_layers=n), profile
        ).classes["activations"][0]
        for n in (0, 2, 8, None)
    ]
    assert peaks[0] >= peaks[1] >= peaks[2]
    assert whole == sorted(whole, reverse=True)


@settings(max_examples=30, deadline=None)
@given(
    dp=st.sampled_from([1, 2, 8, 64]),
    name=st.sampled_from(sorted(p.stem for p in PROFILES.glob("*.yaml"))),
)
def test_a_higher_zero_stage_never_leaves_more_between_steps(dp: int, name: str) -> None:
    profile = load_profile(name)
    resident = [
        stack_memory(_scenario(), ParallelPlan(dp_shard=dp, zero_stage=z), profile).resident[0]
        for z in (0, 1, 2, 3)
    ]
    assert resident == sorted(resident, reverse=True)


@settings(max_examples=30, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4]),
    tp=st.sampled_from([1, 4]),
    name=st.sampled_from(sorted(p.stem for p in PROFILES.glob("*.yaml"))),
    fp8=st.booleans(),
    rank=st.sampled_from([None, 8]),
)
def test_every_class_is_finite_and_sums_to_the_peak(
    pp: int, tp: int, name: str, fp8: bool, rank: int | None
) -> None:
    precision = Precision(gemm="fp8_tensor" if fp8 else "same")
    memory = stack_memory(
        _scenario(precision=precision, lora_rank=rank),
        ParallelPlan(pp=pp, tp=tp, dp_shard=2, zero_stage=1),
        load_profile(name),
    )
    for values in (*memory.classes.values(), memory.resident, memory.first_step, memory.host):
        assert values.shape == (pp,)
        assert np.isfinite(values).all()
        assert (values >= 0).all()
    assert memory.allocated == pytest.approx(sum(memory.classes.values()))
    assert (memory.held >= memory.allocated).all()


def test_profiles_are_told_by_name_and_unknown_frameworks_are_plain_pytorch() -> None:
    for path in PROFILES.glob("*.yaml"):
        assert load_profile(path.stem).name == path.stem
    assert profile_of("Megatron-DeepSpeed").name == "megatron_deepspeed"
    assert profile_of("Megatron-LM core_r0.12").name == "megatron"
    assert profile_of("NVIDIA NeMo Framework 25.04").name == "megatron_bridge"
    assert profile_of("torchtitan").name == "torchtitan"
    assert profile_of("something new").name == "fsdp2"
    with pytest.raises(InputError, match="megatron"):
        load_profile("megatrom")


def test_workspaces_grow_with_hopper() -> None:
    gpu = BASE.cluster.node.gpu
    old = gpu.model_copy(update={"name": "a100_sxm_80gb"})
    assert workspace_bytes(gpu) == 4 * workspace_bytes(old)
    assert workspace_bytes(gpu.model_copy(update={"kind": "cpu"})) == 0
