"""Every rule refuses what it names; the vectorised rules equal the plan's own."""

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import MAX_MICROBATCHES, ParallelPlan, plan_violations
from flopwright.plan.ramp import at_batch
from flopwright.planner.constraints import RULES, broken_rules, legal, violations
from flopwright.simulator.training.candidates import SCHEDULES, Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_scenario
from flopwright.spec.phases import BatchRamp
from flopwright.spec.scenario import Scenario

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
MINI = load_scenario("kimi_k2_mini_2cpu_fp32")
RAMP = BatchRamp(start=4096, increment=3072, tokens=10**9)
RAMPED = K2.model_copy(update={"workload": K2.workload.model_copy(update={"batch_ramp": RAMP})})
GOOD = ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1, recompute="selective")


def _change(**fields: object) -> ParallelPlan:
    return GOOD.model_copy(update=fields)


# rule -> plan that breaks it, on the K2 scenario
BROKEN = {
    "ranks": _change(dp_shard=256),
    "expert_ranks": _change(ep=48),
    "heads": _change(tp=3),
    "experts": _change(ep=5, dp_shard=125),
    "chunks": _change(pp=64, dp_shard=32),
    "layer_split": _change(layers_per_stage=(61,)),
    "zero_in_pipeline": _change(zero_stage=2),
    "schedule": _change(vpp=2),
    "batch": _change(micro_batch_size=3),
    "interleaved_batch": _change(
        vpp=2, schedule="interleaved_1f1b", pp=16, micro_batch_size=16, dp_shard=128
    ),
    "schedule_batch": _change(vpp=2, schedule="dualpipe_v", micro_batch_size=8),
    "expert_shards": _change(etp=3),
    "tokens_sent_once": _change(tp=2, dp_shard=64, sequence_parallel=False),
    "ulysses_heads": _change(cp=128, dp_shard=1, context_parallel="ulysses"),
    "recompute_lists": _change(recompute="none", recompute_tags=("norm",)),
    "recompute_depth": _change(recompute_layers=2),
    "gradient_shards_move": _change(gradient_offload=True, optimizer_offload=True),
    "weight_shards_move": _change(parameter_offload=True),
    "all_gpus": _change(dp_shard=64),
    "tp_in_node": _change(tp=16, pp=1, dp_shard=128),
    "sequence_shards": _change(cp=3),
    "zero_needs_ranks": _change(dp_shard=1, tp=8, pp=32, ep=8),
    "replicas_need_sharding": _change(zero_stage=0, dp_replicate=2, dp_shard=64),
    "virtual_stages_need_a_pipeline": _change(
        pp=1, vpp=2, schedule="interleaved_1f1b", dp_shard=2048
    ),
    "fp8_stores_something": _change(recompute="full", fp8_activations=True),
}


def _breaks(plan: ParallelPlan, scenario: Scenario = K2) -> set[str]:
    found = broken_rules(Candidates.from_plans((plan,)), scenario)
    return {name for name, mask in found.items() if mask[0]}


def test_the_published_plan_breaks_no_rule() -> None:
    assert _breaks(GOOD) == set()
    assert violations(GOOD, K2) == ()


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_each_rule_refuses_what_it_names(name: str) -> None:
    scenario = K2
    if name == "interleaved_batch":  # 16384 / (16*128) = 8 micro-batches for 16 stages
        assert GOOD.num_microbatches(16384) == 128
    assert name in _breaks(BROKEN[name], scenario)
    rule = next(r for r in RULES if r.name == name)
    spoken = [v for v in violations(BROKEN[name], scenario) if v.field.startswith("parallel.")]
    assert any(v.field == rule.field for v in spoken)


def test_context_rule_speaks_of_the_workload() -> None:
    long = K2.workload.model_copy(update={"seq_len": 2**18, "global_batch_size": 256})
    scenario = K2.model_copy(update={"workload": long})
    plan = _change(dp_shard=128)
    assert "context" in _breaks(plan, scenario)
    assert any(v.field == "workload.seq_len" for v in violations(plan, scenario))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("fp8_format", ParallelPlan(dp_shard=2, fp8_activations=True)),
        ("host_link", ParallelPlan(dp_shard=2, optimizer_offload=True)),
        ("host_link", ParallelPlan(dp_shard=2, activation_offload=True)),
    ],
)
def test_a_cpu_cluster_has_neither_fp8_nor_a_host_link(name: str, plan: ParallelPlan) -> None:
    assert _breaks(plan, MINI) == {name}
    (found,) = violations(plan, MINI)
    assert found.nearest_fix


def test_every_rule_has_a_test() -> None:
    tested = set(BROKEN) | {"context", "fp8_format", "host_link", "microbatches"}
    assert tested == {r.name for r in RULES}


@pytest.mark.parametrize("scenario", [K2, RAMPED], ids=["k2", "ramped"])
def test_shape_rules_equal_the_plans_own_on_random_plans(scenario: Scenario) -> None:
    rng = np.random.default_rng(0)
    plans = []
    for _ in range(2000):
        vpp = int(rng.choice([1, 1, 2, 2, 3]))
        plans.append(
            ParallelPlan(
                dp_replicate=int(rng.choice([1, 2])),
                dp_shard=int(rng.choice([1, 2, 3, 16, 64, 128])),
                tp=int(rng.choice([1, 2, 3, 8])),
                pp=int(rng.choice([1, 2, 4, 16, 61, 64])),
                vpp=vpp,
                ep=int(rng.choice([1, 2, 5, 16])),
                micro_batch_size=int(rng.choice([1, 2, 3, 16])),
                zero_stage=int(rng.choice([0, 1, 2, 3])),
                schedule=str(rng.choice(SCHEDULES)),
                etp=int(rng.choice([1, 1, 2, 3])),
                sequence_parallel=bool(rng.random() < 0.9),
                context_parallel=str(rng.choice(["ring", "ulysses"])),
                recompute=(policy := str(rng.choice(["none", "selective", "full"]))),
                recompute_tags=("norm",) if policy == "selective" and rng.random() < 0.9 else (),
                recompute_layers=1 if policy == "full" and rng.random() < 0.9 else None,
                optimizer_offload=bool(rng.integers(2)),
                gradient_offload=bool(rng.random() < 0.1),
                parameter_offload=bool(rng.random() < 0.1),
            )
        )
    shape = [r for r in RULES if r.shape]
    candidates = Candidates.from_plans(plans)
    holds = np.all([r.holds(candidates, scenario) for r in shape], axis=0)
    expected = np.array([not plan_violations(p, scenario) for p in plans])
    at_each = [at_batch(scenario, b) for b in scenario.workload.batches]
    one_by_one = [not any(plan_violations(p, s) for s in at_each) for p in plans]
    assert expected.tolist() == one_by_one
    assert 20 < expected.sum() < 1500  # both kinds are there
    np.testing.assert_array_equal(holds, expected)


def test_legal_is_the_same_as_no_violation_on_random_plans() -> None:
    rng = np.random.default_rng(1)
    plans = [
        ParallelPlan(
            dp_shard=int(rng.choice([64, 128, 256])),
            tp=int(rng.choice([1, 2])),
            pp=int(rng.choice([8, 16])),
            ep=int(rng.choice([8, 16, 48])),
            zero_stage=int(rng.choice([0, 1, 2])),
            recompute=str(rng.choice(["none", "full"])),
            fp8_activations=bool(rng.integers(2)),
        )
        for _ in range(400)
    ]
    mask = legal(Candidates.from_plans(plans), K2)
    expected = [not violations(p, K2) for p in plans]
    assert 0 < sum(expected) < len(plans)
    np.testing.assert_array_equal(mask, expected)


def test_cost_may_use_fewer_gpus_but_not_more() -> None:
    cheap = K2.model_copy(update={"objective": "cost"})
    assert "all_gpus" not in _breaks(_change(dp_shard=64), cheap)
    assert {"ranks", "all_gpus"} <= _breaks(_change(dp_shard=256), cheap)


def test_fix_for_unused_gpus_is_a_plan_that_uses_them() -> None:
    (found,) = violations(_change(dp_shard=64), K2)
    assert found.nearest_fix == "use dp 128"
    odd = violations(_change(pp=3, dp_shard=16), K2)
    assert any("must divide 2048" in v.nearest_fix for v in odd)


def test_a_step_of_endless_microbatches_is_refused() -> None:
    """One list entry a micro-batch: a batch of 10^8 sequences on two ranks would not end."""
    batch = 4 * 25 * MAX_MICROBATCHES
    endless = MINI.model_copy(
        update={"workload": MINI.workload.model_copy(update={"global_batch_size": batch})}
    )
    plan = ParallelPlan(dp_shard=2, micro_batch_size=2)
    (violation,) = violations(plan, endless)
    assert violation.field == "parallel.num_microbatches"
    assert violation.value == str(batch // 4)
    one = Candidates.from_plans((plan,))
    assert not legal(one, endless)[0]
    with pytest.raises(InputError, match="micro-batches a step"):
        evaluate(endless, one)
    assert not violations(plan.model_copy(update={"micro_batch_size": 50}), endless)


def test_ranks_whose_product_wraps_in_64_bits_are_refused() -> None:
    """10^7 to the fifth, modulo 2^64, is a number like any other."""
    huge = ParallelPlan(dp_replicate=10**7, dp_shard=10**7, tp=10**7, cp=10**7, pp=10**7)
    assert "parallel.world_size" in {v.field for v in violations(huge, MINI)}
    wraps = ParallelPlan(dp_replicate=2**16, dp_shard=2**16, tp=2**16, cp=2**16)
    for plan in (huge, wraps):
        with pytest.raises(InputError, match="must not exceed the cluster's GPUs"):
            evaluate(MINI, Candidates.from_plans((plan,)))
