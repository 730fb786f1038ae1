"""Bytes by class and stage: published figures of Kimi K2, and the twin in plan/sharding.py."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import owned_tensors
from flopwright.report.metrics import MEMORY_CLASSES
from flopwright.simulator.memory.stages import FP8_BYTES_PER_NUMBER
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import Evaluation, evaluate
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.parameters import layer_parameters, num_params
from flopwright.spec.scenario import Scenario

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
MINI = load_scenario("kimi_k2_mini_2cpu_fp32")
GB = 1e9
# PP16 x EP16, layers 3 + 13 x 4 + 3 + 3, embedding first and head last.
REPORTED = ParallelPlan(
    pp=16, ep=16, dp_shard=128, zero_stage=1, layers_per_stage=(3, *[4] * 13, 3, 3)
)


def _evaluate(scenario: Scenario, *plans: ParallelPlan) -> Evaluation:
    return evaluate(scenario, Candidates.from_plans(plans))


def _weights_and_gradients(plan: ParallelPlan) -> np.ndarray:
    memory = _evaluate(K2, plan).memory_bytes
    return (memory["weights"] + memory["gradients"])[:, 0] / GB


def test_k2_weights_and_fp32_gradients_by_stage() -> None:
    """arXiv 2507.20534, 2.4.2: about 30 GB a GPU for all states, 6 TB over 256 GPUs."""
    by_stage = _weights_and_gradients(REPORTED)
    assert by_stage.mean() == pytest.approx(28.178, abs=5e-4)
    expected = [24.49, *[28.92] * 13, 21.69, 28.73]
    assert by_stage == pytest.approx(expected, abs=5e-3)


def test_k2_with_a_fourth_layer_on_the_first_stage() -> None:
    plan = REPORTED.model_copy(update={"layers_per_stage": (*[4] * 13, 3, 3, 3)})
    assert _weights_and_gradients(plan)[0] == pytest.approx(31.72, abs=5e-3)


def test_k2_optimizer_state_is_cut_over_its_replicas() -> None:
    """Muon: fp32 master and one momentum a matrix weight; experts over 8 ranks, dense over 128."""
    state = _evaluate(K2, REPORTED).memory_bytes["optimizer_state"][:, 0]
    layer = 384 * 3 * 7168 * 2048 / 16 / 8  # a layer's expert weights on one rank
    assert state[5] == pytest.approx(4 * layer * 8, rel=0.02)


def _plans() -> list[ParallelPlan]:
    return [
        ParallelPlan(pp=4, tp=2, dp_shard=4, ep=8, zero_stage=1),
        ParallelPlan(pp=2, dp_shard=8, ep=2, zero_stage=1, schedule="gpipe"),
        ParallelPlan(tp=4, dp_shard=4, ep=2, zero_stage=1),
        ParallelPlan(pp=2, vpp=2, tp=4, dp_shard=2, ep=4, schedule="interleaved_1f1b"),
        ParallelPlan(dp_shard=4, ep=4, cp=2, zero_stage=3),
    ]


@pytest.mark.parametrize("plan", _plans(), ids=lambda p: p.label())
def test_states_are_those_of_the_sharding_rules(plan: ParallelPlan) -> None:
    """Counts tensor by tensor with plan/sharding.py, which the executor builds from."""
    memory = _evaluate(K2, plan).memory_bytes
    dp, edp = plan.dp * plan.cp, plan.dp * plan.cp * plan.tp // plan.ep
    for stage in range(plan.pp):
        owned = owned_tensors(K2.model, plan, stage)
        held = dict.fromkeys(("weights", "gradients", "optimizer_state"), 0.0)
        for tensor in owned:
            ranks = edp if tensor.expert else dp
            states = 4 + (4 if tensor.param.is_matrix else 8)  # master and Muon or AdamW
            trained = tensor.numel if tensor.param.trainable else 0
            fixed = tensor.numel - trained
            held["weights"] += 2 * (trained / (ranks if plan.zero_stage == 3 else 1) + fixed)
            held["gradients"] += 4 * trained / (ranks if plan.zero_stage >= 2 else 1)
            held["optimizer_state"] += states * trained / (ranks if plan.zero_stage else 1)
        for name, nbytes in held.items():
            assert memory[name][stage, 0] == pytest.approx(nbytes, rel=1e-6)


def test_recompute_fp8_and_offload_shrink_activations() -> None:
    base = {"pp": 16, "ep": 16, "dp_shard": 128, "zero_stage": 1}
    plans = [
        ParallelPlan(**base),
        ParallelPlan(**base, recompute="selective"),
        ParallelPlan(**base, recompute="selective", fp8_activations=True),
        ParallelPlan(**base, recompute="selective", activation_offload=True),
        ParallelPlan(**base, recompute="full"),
    ]
    found = _evaluate(K2, *plans)
    by_stage = found.memory_bytes["activations"]
    kept = by_stage[0]
    assert kept[0] > kept[1] > kept[2] > kept[4]
    assert kept[3] == pytest.approx(kept[1] * 2 / 16)  # two of sixteen micro-batches stay
    held = 16 - np.arange(16)
    away = by_stage[:, 1] * np.maximum(held - 2, 0) / held
    assert found.host_bytes[3] == pytest.approx(8 * away.max())
    assert found.host_bytes[[0, 1, 2, 4]].max() == 0


def test_full_recompute_keeps_one_hidden_state_a_layer() -> None:
    plan = REPORTED.model_copy(update={"recompute": "full"})
    activations = _evaluate(K2, plan).memory_bytes["activations"][:, 0]
    assert activations[1] == 15 * 4 * 4096 * 7168 * 2  # in flight, layers, tokens, width, bf16


def test_fp8_stores_a_byte_and_a_scale_for_every_128_numbers() -> None:
    assert FP8_BYTES_PER_NUMBER == 1.03125
    plain, fp8 = (
        _evaluate(K2, REPORTED.model_copy(update={"fp8_activations": on})).memory_bytes[
            "activations"
        ][1, 0]
        for on in (False, True)
    )
    # inputs of the experts' up-projection and of their SwiGLU: 8 rows a token, plus shared
    tokens, layers, held = 4096, 4, 15
    routed = tokens * 8 * (7168 + 2 * 2048)
    saved = (plain - fp8) / (held * layers) / (2 - FP8_BYTES_PER_NUMBER)
    assert saved >= routed
    assert saved <= routed + tokens * (7168 + 2 * 2048)


def test_an_offloaded_optimizer_stands_on_the_host() -> None:
    on, off = (
        _evaluate(K2, REPORTED.model_copy(update={"optimizer_offload": x})) for x in (True, False)
    )
    assert on.memory_bytes["optimizer_state"].max() == 0
    assert on.host_bytes[0] == 8 * off.memory_bytes["optimizer_state"].max()
    assert on.step_time_s[0] > off.step_time_s[0]


@pytest.mark.parametrize(
    ("flag", "cls", "stage"),
    [("gradient_offload", "gradients", 2), ("parameter_offload", "weights", 3)],
)
def test_shards_that_live_on_the_host_leave_the_rank(flag: str, cls: str, stage: int) -> None:
    plan = ParallelPlan(dp_shard=16, ep=16, zero_stage=stage, optimizer_offload=True)
    on, off = (_evaluate(K2, plan.model_copy(update={flag: x})) for x in (True, False))
    moved = off.memory_bytes[cls][0, 0] - on.memory_bytes[cls][0, 0]
    assert moved > 0.99 * off.memory_bytes[cls][0, 0]  # router biases stay
    assert on.host_bytes[0] - off.host_bytes[0] == pytest.approx(8 * moved, rel=1e-6)


def test_adapters_leave_frozen_weights_in_their_own_format() -> None:
    precision = K2.workload.precision.model_copy(update={"frozen_weights": "fp8"})
    model = load_model("llama31_8b")
    lora, fp8 = (
        K2.model_copy(
            update={
                "model": model,
                "workload": K2.workload.model_copy(update={"lora_rank": 16, "precision": p}),
            }
        )
        for p in (K2.workload.precision, precision)
    )
    plain, small = (_evaluate(s, ParallelPlan()).memory_bytes for s in (lora, fp8))
    tables = 2 * model.vocab_size * model.hidden_size
    layers = num_params(model) - tables
    assert plain["weights"][0, 0] == pytest.approx(2 * num_params(model), rel=0.01)
    gone = plain["weights"][0, 0] - small["weights"][0, 0]
    assert gone == pytest.approx(layers, rel=1e-3)
    adapters = plain["gradients"][0, 0] / 4
    assert adapters < 0.01 * layers
    sharded = _evaluate(lora, ParallelPlan(dp_shard=8, zero_stage=3)).memory_bytes
    assert sharded["weights"][0, 0] == pytest.approx(plain["weights"][0, 0] / 8, rel=1e-6)


def test_expert_shards_hold_their_part_of_every_expert() -> None:
    base = {"tp": 4, "dp_shard": 4, "zero_stage": 1}
    whole, cut = (_evaluate(K2, ParallelPlan(**base, ep=4, etp=n)).memory_bytes for n in (1, 4))
    experts = 60 * 384 * 3 * 7168 * 2048
    gone = whole["weights"].sum() - cut["weights"].sum()
    assert gone == pytest.approx(2 * experts * (1 / 4 - 1 / 16), rel=1e-6)
    states = (whole["optimizer_state"] / cut["optimizer_state"]).max()
    assert states == pytest.approx(1, rel=0.01)  # four times the ranks shared each part before


def test_a_v_keeps_embedding_and_head_on_the_first_stage() -> None:
    found = _evaluate(K2, ParallelPlan(pp=2, vpp=2, schedule="zb_v", ep=16, dp_shard=16))
    flat = _evaluate(K2, ParallelPlan(pp=2, ep=16, dp_shard=16))
    tables = 2 * 2 * 163840 * 7168
    weights = [f.memory_bytes["weights"][:, 0] for f in (found, flat)]
    assert weights[0].sum() == pytest.approx(weights[1].sum())
    dense = 2 * sum(p.numel for p in layer_parameters(K2.model, 0))
    # 61 layers over 4 chunks: both stages have 30 with experts, the first the dense one too.
    assert weights[0][0] - weights[0][1] == pytest.approx(tables + dense, rel=1e-3)


def test_plans_that_do_not_fit_say_so() -> None:
    found = _evaluate(K2, REPORTED, REPORTED.model_copy(update={"recompute": "full"}))
    assert found.fits.tolist() == [False, True]
    assert found.peak_bytes[0] > K2.cluster.node.gpu.hbm_bytes


def test_a_tied_head_on_another_stage_is_a_second_copy() -> None:
    tied = K2.model_copy(update={"model": K2.model.model_copy(update={"tied_embeddings": True})})
    for pp, missing in ((1, 1), (4, 0)):
        plan = ParallelPlan(pp=pp, dp_shard=16, ep=16)
        weights = [_evaluate(s, plan).memory_bytes["weights"].sum() for s in (K2, tied)]
        assert weights[0] - weights[1] == missing * 2 * 163840 * 7168


def test_cpu_ranks_hold_what_the_executor_allocates() -> None:
    """fp32 weights are their own masters; AdamW's two moments are cut by ZeRO-1."""
    found = _evaluate(
        MINI, ParallelPlan(dp_shard=2, zero_stage=1, micro_batch_size=4)
    ).memory_bytes
    trained = found["gradients"][0, 0] / 4
    assert found["optimizer_state"][0, 0] == pytest.approx(trained / 2 * 2 * 4, rel=1e-6)
    assert found["weights"][0, 0] == pytest.approx(trained * 4 + 3 * 16 * 4)  # 3 routers' biases


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    pp=st.sampled_from([1, 2, 4, 16]),
    tp=st.sampled_from([1, 2, 8]),
    zero=st.sampled_from([0, 1]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
)
def test_every_class_is_finite_and_whole(
    pp: int, tp: int, zero: int, recompute: str, flags: tuple[bool, bool, bool]
) -> None:
    plan = ParallelPlan(
        pp=pp,
        tp=tp,
        dp_shard=16,
        ep=16,
        zero_stage=zero,
        recompute=recompute,
        fp8_activations=flags[0],
        activation_offload=flags[1],
        optimizer_offload=flags[2],
    )
    memory = _evaluate(K2, plan).memory_bytes
    assert set(memory) == set(MEMORY_CLASSES)
    for values in memory.values():
        assert np.isfinite(values).all()
        assert (values >= 0).all()
        assert (values == np.rint(values)).all()
