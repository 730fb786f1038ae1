"""What stands beside a plan and what more would buy: against plans made apart."""

from typing import Any

import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.planner.questions.explained import explain, plan_of
from flopwright.planner.questions.more import best_of_layout
from flopwright.planner.questions.neighbours import neighbours
from flopwright.planner.questions.replan import with_hbm
from flopwright.planner.search import search
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.cluster import LinkSpec
from flopwright.spec.load import load_cluster, load_model, load_scenario
from flopwright.spec.scenario import Scenario, SearchSpace
from flopwright.spec.workload import Precision

MODEL = load_model("llama31_8b").model_copy(update={"num_layers": 8})
WORKLOAD = load_scenario("kimi_k2_mini_2cpu_fp32").workload.model_copy(
    update={
        "seq_len": 4096,
        "global_batch_size": 32,
        "total_tokens": 10**10,
        "precision": Precision(),
    }
)
SCENARIO = Scenario(
    name="b",
    model=MODEL,
    cluster=load_cluster("8_h100"),
    workload=WORKLOAD,
    search=SearchSpace(micro_batch_size=(1, 2), vpp=(1,)),
)
CALIBRATION = default_calibration(SCENARIO.cluster.node.gpu)
PLAN = ParallelPlan(tp=2, dp_shard=4, zero_stage=1, micro_batch_size=2)


def _step_s(scenario: Scenario, plan: ParallelPlan) -> float:
    return predict(scenario, plan, CALIBRATION, whole_trace=False)[0].metrics.step_time_s


def _cluster(change: dict[str, Any]) -> Scenario:
    node = SCENARIO.cluster.node.model_copy(update=change)
    return SCENARIO.model_copy(
        update={"cluster": SCENARIO.cluster.model_copy(update={"node": node})}
    )


@pytest.mark.slow
def test_a_sensitivity_is_the_difference_of_two_plans() -> None:
    found = {f.role: f.gain for f in explain(SCENARIO, PLAN, CALIBRATION).faster}
    base = _step_s(SCENARIO, PLAN)
    link = SCENARIO.cluster.node.link
    quick = link.model_copy(
        update={"bytes_per_s": 1.1 * link.bytes_per_s, "latency_s": link.latency_s / 1.1}
    )
    assert found["node link"] == pytest.approx(
        1 - _step_s(_cluster({"link": quick}), PLAN) / base, rel=0.02
    )
    gpu = SCENARIO.cluster.node.gpu
    peaks = {k: 1.1 * v for k, v in gpu.peak_flops_per_s.items()}
    strong = _cluster({"gpu": gpu.model_copy(update={"peak_flops_per_s": peaks})})
    assert found["compute"] == pytest.approx(1 - _step_s(strong, PLAN) / base, rel=0.02)
    wide = gpu.model_copy(update={"hbm_bytes_per_s": 1.1 * gpu.hbm_bytes_per_s})
    gain = 1 - _step_s(_cluster({"gpu": wide}), PLAN) / base
    assert found["memory bandwidth"] == pytest.approx(gain, rel=0.02)
    assert found["compute"] > found["node link"] > 0


def test_neighbours_say_what_each_violates_or_loses() -> None:
    scenario = with_hbm(SCENARIO, 33 * 2**30)
    found = neighbours(scenario, PLAN, CALIBRATION)
    base = _step_s(scenario, PLAN)
    outcomes = set()
    for n in found:
        outcomes.add(n.outcome)
        if n.outcome == "breaks a rule":
            continue
        assert not plan_violations(n.plan, scenario)
        metrics = predict(scenario, n.plan, CALIBRATION, whole_trace=False)[0].metrics
        assert n.behind == pytest.approx(metrics.step_time_s / base - 1, abs=1e-9)
        assert n.missing_bytes == max(metrics.peak_memory_bytes - 33 * 2**30, 0)
        assert (n.outcome == "does not fit") == (n.missing_bytes > 0)
    assert {"does not fit", "slower", "faster"} <= outcomes
    refused = [
        n
        for n in neighbours(
            SCENARIO, PLAN.model_copy(update={"pp": 2, "dp_shard": 2}), CALIBRATION
        )
        if n.outcome == "breaks a rule"
    ]
    assert any("pipeline" in n.text for n in refused)


@pytest.mark.slow
def test_purchases_are_searches_of_the_layout_on_more() -> None:
    whole = explain(SCENARIO, PLAN, CALIBRATION)
    by_what = {p.what: p for p in whole.purchases}
    fixed = {"tp": 2, "pp": 1, "cp": 1, "ep": 1}
    base = search(SCENARIO, CALIBRATION, 1, fixed=fixed).best
    two = SCENARIO.model_copy(
        update={"cluster": SCENARIO.cluster.model_copy(update={"num_nodes": 2})}
    )
    double = search(two, CALIBRATION, 1, fixed=fixed).best
    assert base is not None
    assert double is not None
    now, then = (b.prediction.metrics.step_time_s for b in (base, double))
    assert by_what["16 GPUs"].step_time_s == pytest.approx(then)
    assert by_what["16 GPUs"].gain == pytest.approx(1 - then / now, rel=0.02)


def test_one_gib_may_be_what_is_missing() -> None:
    """Memory just below a faster plan's peak: the next GiB buys that plan, no less."""
    roomy = best_of_layout(SCENARIO, PLAN, CALIBRATION)
    assert roomy is not None
    short = with_hbm(SCENARIO, roomy.peak_memory_bytes - 2**30 + 2**20)
    first = next(p for p in explain(short, PLAN, CALIBRATION).purchases if p.kind == "memory")
    assert first.plan == roomy.plan
    assert first.gain is not None
    assert first.gain > 0


def test_memory_may_buy_a_plan_one_choice_away() -> None:
    scenario = with_hbm(SCENARIO, 33 * 2**30)
    whole = explain(scenario, PLAN, CALIBRATION)
    faster = [n for n in whole.neighbours if n.missing_bytes and (n.behind or 0) < 0]
    assert faster
    first = min(faster, key=lambda n: n.missing_bytes)
    assert 2**30 < first.missing_bytes < 8 * 2**30
    by_what = {p.what: p.step_time_s or 0.0 for p in whole.purchases}
    assert by_what["8 GiB a GPU"] <= _step_s(scenario, first.plan) * (1 + 1e-9)
    assert by_what["8 GiB a GPU"] < by_what["1 GiB a GPU"]


@pytest.mark.slow
def test_a_plan_that_lacks_memory_is_explained_by_it() -> None:
    tight = with_hbm(SCENARIO, 3 * 2**30)
    plan, result = plan_of(tight, None, CALIBRATION)
    assert result is not None
    assert result.verdict == "does_not_fit"
    assert explain(tight, plan, CALIBRATION, result).verdict_text.startswith("does not fit")
    whole = explain(tight, PLAN, CALIBRATION)
    assert "lacks" in whole.verdict_text


def test_a_plan_that_breaks_rules_is_refused_with_all_of_them() -> None:
    with pytest.raises(InputError) as caught:
        plan_of(SCENARIO, ParallelPlan(tp=3, dp_shard=7), CALIBRATION)
    assert len(caught.value.violations) >= 2


def test_every_sensitivity_is_the_difference_of_two_plans_across_nodes() -> None:
    """Network, host link and launch floor too: two predictions of the same plan, by hand."""
    cluster = load_cluster("64_h100").model_copy(update={"num_nodes": 2})
    scenario = SCENARIO.model_copy(update={"cluster": cluster})
    plan = ParallelPlan(
        tp=2, dp_shard=8, zero_stage=1, micro_batch_size=2, activation_offload=True
    )
    found = {f.role: f.gain for f in explain(scenario, plan, CALIBRATION).faster}

    def seconds(calibration: Calibration = CALIBRATION, **changes: object) -> float:
        changed = cluster.model_copy(update=changes)
        at = scenario.model_copy(update={"cluster": changed})
        return predict(at, plan, calibration, whole_trace=False)[0].metrics.step_time_s

    def wider(link: LinkSpec | None) -> LinkSpec:
        assert link is not None
        quick = {"bytes_per_s": 1.1 * link.bytes_per_s, "latency_s": link.latency_s / 1.1}
        return link.model_copy(update=quick)

    node, base = cluster.node, seconds()
    by_hand = {
        "network": seconds(network=wider(cluster.network)),
        "node link": seconds(node=node.model_copy(update={"link": wider(node.link)})),
        "host link": seconds(node=node.model_copy(update={"host_link": wider(node.host_link)})),
    }
    curves = tuple(c.model_copy(update={"floor_s": c.floor_s / 1.1}) for c in CALIBRATION.curves)
    floors = CALIBRATION.model_copy(
        update={"curves": curves, "host_floor_s": CALIBRATION.host_floor_s / 1.1}
    )
    gpu = node.gpu.model_copy(update={"launch_floor_s": node.gpu.launch_floor_s / 1.1})
    by_hand["launch floor"] = seconds(floors, node=node.model_copy(update={"gpu": gpu}))
    for role, step_s in by_hand.items():
        assert found[role] == pytest.approx(1 - step_s / base, rel=0.02, abs=1e-9), role
    assert found["network"] > 0
    assert found["host link"] > 0
