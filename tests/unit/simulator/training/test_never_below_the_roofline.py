"""Random plans on random stacks: no step is faster than its slowest resource, none is a NaN."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from flopwright.errors import InputError
from flopwright.plan.parallel import RECOMPUTE_TAGS, ParallelPlan, plan_violations
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import plan_costs
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import ExpertLoad

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
PRIOR = default_calibration(K2.cluster.node.gpu)
MODELS = ("llama31_8b", "qwen3_30b_a3b", "gpt_h2048_l24", "deepseek_v3")
SHARE = st.floats(0, 1)


@dataclass(frozen=True)
class Case:
    """What is priced."""

    scenario: Scenario
    plan: ParallelPlan
    stack: Calibration


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws a model, a workload, a plan with every choice there is, and a stack."""
    model = load_model(draw(st.sampled_from(MODELS)))
    gemm = draw(st.sampled_from(["same", "fp8_tensor", "fp8_block", "mxfp8"]))
    precision = K2.workload.precision.model_copy(update={"gemm": gemm})
    load = ExpertLoad(
        kind=draw(st.sampled_from(["balanced", "power_law", "capacity"])),
        exponent=draw(st.floats(0, 2)),
        redundant_experts=draw(st.sampled_from([0, 0, 7])),
    )
    workload = K2.workload.model_copy(
        update={
            "seq_len": min(2048, model.max_seq_len),
            "global_batch_size": 128,
            "precision": precision,
            "lora_rank": draw(st.sampled_from([None, None, 16])),
            "expert_load": load,
        }
    )
    scenario = K2.model_copy(update={"model": model, "workload": workload})
    slower = draw(st.sampled_from([1.0, 1.0, 0.03]))
    return Case(_slow_links(scenario, slower), draw(plans()), draw(stacks()))


def _slow_links(scenario: Scenario, factor: float) -> Scenario:
    """Returns the scenario with the bandwidth of its links times `factor`."""
    cluster = scenario.cluster
    node, network = cluster.node, cluster.network
    assert network is not None
    near, far = (
        k.model_copy(update={"bytes_per_s": k.bytes_per_s * factor}) for k in (node.link, network)
    )
    slow = node.model_copy(update={"link": near})
    return scenario.model_copy(
        update={"cluster": cluster.model_copy(update={"node": slow, "network": far})}
    )


@st.composite
def plans(draw: st.DrawFn) -> ParallelPlan:
    """Draws a plan; what does not go together is left to plan_violations."""
    pp = draw(st.sampled_from([1, 1, 2, 4]))
    vpp = draw(st.sampled_from([1, 2])) if pp > 1 else 1
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    tags = draw(st.lists(st.sampled_from(RECOMPUTE_TAGS), max_size=3, unique=True))
    zero = draw(st.sampled_from([0, 1] if pp > 1 else [0, 1, 2, 3]))
    fields: dict[str, Any] = {
        "pp": pp,
        "vpp": vpp,
        "schedule": "interleaved_1f1b" if vpp > 1 else "1f1b",
        "tp": draw(st.sampled_from([1, 2, 4])),
        "cp": draw(st.sampled_from([1, 1, 2])),
        "dp_shard": draw(st.sampled_from([4, 8, 16])),
        "dp_replicate": draw(st.sampled_from([1, 1, 2])),
        "ep": draw(st.sampled_from([1, 4, 8])),
        "etp": draw(st.sampled_from([1, 1, 2])),
        "micro_batch_size": draw(st.sampled_from([1, 2])),
        "zero_stage": zero,
        "sequence_parallel": draw(st.booleans()),
        "context_parallel": draw(st.sampled_from(["ring", "all_gather", "ulysses"])),
        "recompute": recompute,
        "recompute_tags": tuple(tags) if recompute == "selective" else (),
        "recompute_layers": draw(st.sampled_from([None, 1, 3])) if recompute == "full" else None,
        "optimizer_offload": zero >= 2,
        "gradient_offload": zero >= 2 and draw(st.booleans()),
        "parameter_offload": zero == 3 and draw(st.booleans()),
        "activation_offload": draw(st.booleans()),
    }
    return ParallelPlan(**fields)


@st.composite
def stacks(draw: st.DrawFn) -> Calibration:
    """Draws a stack whose factors slow down, and whose overlap hides any share."""
    classes = ("tp_comm", "cp_comm", "ep_comm", "dp_comm", "dp_gather", "pp_comm", "offload")
    return PRIOR.model_copy(
        update={
            "hidden_share": {c: draw(SHARE) for c in classes},
            "overlap_slowdown": {"tp_comm": draw(st.floats(0, 0.5))},
            "layer_host_s": {"dense": draw(st.floats(0, 0.02)), "moe": draw(st.floats(0, 0.02))},
            "kernel_factors": {"unaligned": 1.2, "odd": 3.0, "gemm": draw(st.floats(1, 2))},
            "attention_kernel": draw(st.sampled_from(["flash", "unfused"])),
            "pad_vocab_to": draw(st.sampled_from([1, 128])),
            "step_constant_s": draw(st.floats(0, 1)),
            "data_parallel_latency_s": draw(st.floats(0, 1e-4)),
        }
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(cases())
def test_no_step_is_faster_than_its_slowest_resource(case: Case) -> None:
    scenario, plan, stack = case.scenario, case.plan, case.stack
    assume(not plan_violations(plan, scenario))
    found = evaluate(scenario, Candidates.from_plans([plan]), stack)
    step = float(found.step_time_s[0])
    assert np.isfinite(step)
    m = plan.num_microbatches(scenario.workload.global_batch_size)
    costs = plan_costs(scenario, plan, stack)
    peaks = scenario.cluster.node.gpu.peak_flops_per_s
    fastest = max(v for k, v in peaks.items() if k in {"bf16", "fp8"})
    busiest = costs.pick.by_stage(costs.flops).max()
    assert step >= m * busiest / fastest
    # Each way over the slowest link that a group may use: nothing is hidden from the wire.
    assert step >= stack.step_constant_s
    host = sum(
        stack.layer_host_s[k] * n
        for k, n in _layers_a_stage(scenario, plan).items()
        if n and k in stack.layer_host_s
    )
    assert step >= m * host * (1 - 1e-9)
    everything = [*found.time_s.values(), *found.memory_bytes.values(), *found.comm_bytes.values()]
    assert all(np.isfinite(v).all() and (v >= 0).all() for v in everything)
    assert sum(float(v[0]) for v in found.time_s.values()) == pytest.approx(step)


def _layers_a_stage(scenario: Scenario, plan: ParallelPlan) -> dict[str, int]:
    """Returns the layers of the stage that the host has the most work with, one kind alone."""
    model = scenario.model
    stages = plan.stage_layers(model.num_layers)
    dense = max(sum(not model.is_moe_layer(i) for i in s) for s in stages)
    moe = max(sum(model.is_moe_layer(i) for i in s) for s in stages)
    return {"dense": dense} if dense > moe else {"moe": moe}


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(cases())
def test_links_carry_what_they_carry(case: Case) -> None:
    """Hidden or not, a step lasts as long as its compute, and as all that its layers send."""
    scenario, plan = case.scenario, case.plan
    assume(not plan_violations(plan, scenario))
    open_stack = case.stack.model_copy(update={"hidden_share": {}, "layer_host_s": {}})
    raw = plan_costs(scenario, plan, open_stack)
    found = evaluate(scenario, Candidates.from_plans([plan]), case.stack)
    m = plan.num_microbatches(scenario.workload.global_batch_size)
    classes = ("tp_comm", "cp_comm", "ep_comm")
    sent = [s[c] for c in classes for s in (raw.forward, raw.backward) if c in s]
    if sent:
        wire = m * raw.pick.by_stage(np.asarray(sum(sent))).max()
        assert found.step_time_s[0] >= wire * (1 - 1e-9)
    compute = raw.pick.by_stage(np.asarray(sum(raw.kernel_s.values()))).max()
    assert found.step_time_s[0] >= m * compute * (1 - 1e-9)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"etp": 3}, "etp"),
        ({"tp": 2, "sequence_parallel": False, "ep": 4}, "sequence_parallel"),
        ({"cp": 64, "context_parallel": "ulysses"}, "cp"),
        ({"recompute_tags": ("norm",)}, "recompute_tags"),
        ({"recompute": "selective", "recompute_tags": ("nrom",)}, "recompute_tags"),
        ({"recompute_layers": 2}, "recompute_layers"),
        ({"gradient_offload": True}, "gradient_offload"),
        ({"parameter_offload": True}, "parameter_offload"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(fields: dict[str, Any], word: str) -> None:
    scenario = K2.model_copy(update={"model": load_model("qwen3_30b_a3b")})
    plan = ParallelPlan(**({"dp_shard": 8} | fields))
    broken = [v.field for v in plan_violations(plan, scenario)]
    assert f"parallel.{word}" in broken
    assert all(v.nearest_fix for v in plan_violations(plan, scenario))
    with pytest.raises(InputError, match=word):
        evaluate(scenario, Candidates.from_plans([plan]))


def test_all_broken_choices_are_named_at_once() -> None:
    plan = ParallelPlan(
        tp=3, etp=5, dp_shard=8, recompute_tags=("a", "b"), recompute_layers=1,
        gradient_offload=True, parameter_offload=True,
    )  # fmt: skip
    fields = [v.field for v in plan_violations(plan, K2)]
    wanted = {"tp", "etp", "recompute_tags", "recompute_layers", "gradient_offload"}
    assert {f"parallel.{w}" for w in (*wanted, "parameter_offload")} <= set(fields)


def test_a_format_the_processor_has_not_is_an_input_error() -> None:
    a100 = K2.cluster.node.gpu.model_copy(
        update={"name": "no_fp8", "peak_flops_per_s": {"bf16": 3.12e14, "fp32": 1.95e13}}
    )
    node = K2.cluster.node.model_copy(update={"gpu": a100})
    cluster = K2.cluster.model_copy(update={"node": node})
    precision = K2.workload.precision.model_copy(update={"gemm": "mxfp8"})
    workload = K2.workload.model_copy(update={"precision": precision})
    scenario = K2.model_copy(update={"cluster": cluster, "workload": workload})
    plan = ParallelPlan(pp=16, ep=16, dp_shard=128, zero_stage=1)
    with pytest.raises(InputError, match="fp8"):
        evaluate(scenario, Candidates.from_plans([plan]), PRIOR)
