"""Cost and structure error: they sum to the signed error, and each is what it says."""

from __future__ import annotations

import pytest

from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.comparison.parts import predicted_parts
from flopwright.simulator.comparison.run import compared
from flopwright.simulator.comparison.simulated import simulated_measurement
from flopwright.simulator.comparison.split import split_error
from flopwright.simulator.engine.perturb import Perturbation
from flopwright.simulator.engine.simulate import simulate
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario

PLANS = (
    ParallelPlan(dp_shard=2, micro_batch_size=2),
    ParallelPlan(pp=2, micro_batch_size=2),
    ParallelPlan(pp=2, vpp=2, micro_batch_size=2, schedule="zb_v"),
    ParallelPlan(pp=2, vpp=2, micro_batch_size=2, schedule="dualpipe_v"),
)


def scenario() -> Scenario:
    return load_scenario("kimi_k2_mini_2cpu_fp32")


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.label())
def test_a_slow_class_is_a_cost_error(plan: ParallelPlan) -> None:
    """The machine works as the list says, only slower: nothing is left for the structure."""
    believed = default_calibration(scenario().cluster.node.gpu)
    slow = believed.model_copy(update={"factors": {"backward": 1.4}})
    measured = simulated_measurement(
        make_plan_file(scenario(), plan, "p"), slow, engine="replay", samples=1
    )
    prediction, _ = predict(scenario(), plan, believed)
    split = split_error(scenario(), plan, believed, prediction, measured)
    error = prediction.metrics.step_time_s / measured.metrics.step_time_s - 1
    assert split.cost + split.structure == pytest.approx(error, abs=1e-12)
    assert split.cost < -0.1
    assert split.structure == pytest.approx(0.0, abs=0.005)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.label())
def test_time_that_no_action_holds_is_a_structure_error(plan: ParallelPlan) -> None:
    believed = default_calibration(scenario().cluster.node.gpu)
    measured = simulated_measurement(
        make_plan_file(scenario(), plan, "p"), believed, engine="replay", samples=1
    )
    longer = measured.metrics.model_copy(
        update={"step_time_s": measured.metrics.step_time_s * 1.25}
    )
    measured = measured.model_copy(update={"metrics": longer})
    prediction, _ = predict(scenario(), plan, believed)
    split = split_error(scenario(), plan, believed, prediction, measured)
    assert split.structure == pytest.approx(-0.2, abs=0.005)
    assert split.cost == pytest.approx(0.0, abs=0.005)
    comparison = compared(believed, measured)
    assert comparison.worst is not None
    assert comparison.worst.kind == "waiting"


def test_a_slow_rank_is_a_cost_error_too() -> None:
    plan = ParallelPlan(pp=2, micro_batch_size=2)
    believed = default_calibration(scenario().cluster.node.gpu)
    measured = simulated_measurement(
        make_plan_file(scenario(), plan, "p"),
        believed,
        Perturbation(stragglers={1: 1.5}),
        engine="replay",
        samples=1,
    )
    prediction, _ = predict(scenario(), plan, believed)
    split = split_error(scenario(), plan, believed, prediction, measured)
    assert split.basis == "ranks"
    assert split.cost < -0.2
    assert split.structure == pytest.approx(0.0, abs=0.01)


def test_the_runs_own_actions_are_replayed_where_they_were_kept() -> None:
    plan = ParallelPlan(dp_shard=2, micro_batch_size=2)
    believed = default_calibration(scenario().cluster.node.gpu)
    slow = believed.model_copy(update={"factors": {"forward": 1.3}})
    measured = simulated_measurement(
        make_plan_file(scenario(), plan, "p"), slow, engine="replay", samples=1
    )
    step = simulate(
        scenario(), plan, slow, engine="replay", perturbation=Perturbation(stragglers={1: 1.0001})
    )
    prediction, _ = predict(scenario(), plan, believed)
    split = split_error(scenario(), plan, believed, prediction, measured, step.trace)
    assert split.basis == "actions"
    assert split.structure == pytest.approx(0.0, abs=0.02)


@pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.label())
def test_the_parts_are_the_predictions(plan: ParallelPlan) -> None:
    """Compute of a step by stage is what the trace of the prediction holds."""
    believed = default_calibration(scenario().cluster.node.gpu)
    parts = predicted_parts(scenario(), plan, believed)
    _, trace = predict(scenario(), plan, believed)
    for stage in range(plan.pp):
        for name in ("forward", "backward", "optimizer"):
            found = sum(e.end_s - e.start_s for e in trace if (e.rank, e.cls) == (stage, name))
            assert parts.time_s[stage][name] == pytest.approx(found, rel=1e-9)
        kernels = sum(parts.kernel_s[stage].values())
        assert kernels == pytest.approx(
            sum(parts.time_s[stage].get(c, 0.0) for c in ("forward", "backward", "optimizer"))
        )
