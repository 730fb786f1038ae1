"""Memory from the rows that experts got: linear in them, stage by stage, and learnt from."""

from __future__ import annotations

import pytest

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.compare import memory_comparisons
from flopwright.report.metrics import Fingerprint, Measurement
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.fit_runs import fit_runs
from flopwright.simulator.calibration.repredict import memory_as_routed, predict_measurement
from flopwright.simulator.comparison.run import compared
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario, make_plan_file

SCENARIO = load_scenario("kimi_k2_mini_2cpu_fp32")
EXPERTS = ParallelPlan(dp_shard=2, ep=2, micro_batch_size=4)
PRIOR = default_calibration(SCENARIO.cluster.node.gpu)


def measured(rows: tuple[float, ...], plan: ParallelPlan = EXPERTS) -> Measurement:
    """A run that takes what is predicted, and holds what these rows make of the plan."""
    metrics = predict(SCENARIO, plan, PRIOR)[0].metrics
    run = Measurement(
        id="m", created="2026-01-01", plan_name="p",
        plan=make_plan_file(SCENARIO, plan, "p").to_data(), metrics=metrics,
        step_time_p10_s=1, step_time_p90_s=1, step_time_samples_s=(metrics.step_time_s,),
        discarded_steps=0, expert_rows=rows,
        fingerprint=Fingerprint(
            machine="m", processor="p", num_cores=2, world_size=2, threads_per_rank=1,
            memory_bytes=2**33, python="3", tool_version="0",
        ),
    )  # fmt: skip
    stages = memory_as_routed(PRIOR, run)
    return run.model_copy(update={"metrics": metrics.model_copy(update={"memory_bytes": stages})})


def activations(rows: tuple[float, ...]) -> int:
    return memory_as_routed(PRIOR, measured(rows))[0]["activations"]


def test_bytes_grow_by_the_fullest_ranks_rows_alone() -> None:
    even, more, most = (activations((1.0, r)) for r in (1.0, 1.1, 1.2))
    assert even < more < most
    assert most - more == pytest.approx(more - even, abs=2)
    assert activations((1.1, 0.9)) == activations((0.9, 1.1)) == more
    assert even == predict(SCENARIO, EXPERTS, PRIOR)[0].metrics.memory_bytes[0]["activations"]


def test_rows_count_in_their_stage() -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    node = scenario.cluster.node.model_copy(update={"gpus": 4, "cores": 2})
    cluster = scenario.cluster.model_copy(update={"node": node})
    wide = scenario.model_copy(update={"cluster": cluster})
    plan = ParallelPlan(pp=2, dp_shard=2, ep=2, micro_batch_size=2)
    run = measured((1.0, 1.0)).model_copy(
        update={"plan": make_plan_file(wide, plan, "p").to_data()}
    )
    even = memory_as_routed(PRIOR, run.model_copy(update={"expert_rows": ()}))
    found = memory_as_routed(PRIOR, run.model_copy(update={"expert_rows": (1.0, 1.0, 1.0, 1.3)}))
    assert found[0] == even[0]
    assert found[1]["activations"] > even[1]["activations"]
    with pytest.raises(InputError, match="the plan has 4 ranks"):
        memory_as_routed(PRIOR, run.model_copy(update={"expert_rows": (1.0,)}))


def test_compare_tells_both_and_blames_no_memory() -> None:
    run = measured((1.0, 1.2))
    found = compared(PRIOR, run)
    plain = {c.name: c for c in found.memory_classes}["activations"]
    routed = {c.name: c for c in found.routed_memory}["activations"]
    assert plain.predicted < 0.99 * plain.measured
    assert routed.predicted == routed.measured
    assert all(f.kind != "memory" for f in found.findings)
    assert memory_comparisons((), run.metrics) != ()
    even = compared(PRIOR, measured(()))
    assert even.routed_memory == ()


def test_uneven_rows_do_not_become_a_memory_factor() -> None:
    learnt = fit_runs(PRIOR, [measured((1.0, 1.3))], predict_measurement)
    assert learnt.memory_factors["activations"] == pytest.approx(1.0, abs=1e-3)
    blind = measured((1.0, 1.3)).model_copy(update={"expert_rows": ()})
    assert fit_runs(PRIOR, [blind], predict_measurement).memory_factors["activations"] > 1.01


def test_a_run_that_cannot_be_predicted_is_named_with_the_way_round() -> None:
    plan = EXPERTS.model_copy(update={"optimizer_offload": True})
    node = SCENARIO.cluster.node.model_copy(update={"host_link": None})
    cluster = SCENARIO.cluster.model_copy(update={"node": node})
    file = make_plan_file(SCENARIO.model_copy(update={"cluster": cluster}), plan, "p")
    run = measured((1.0, 1.0)).model_copy(update={"plan": file.to_data()})
    with pytest.raises(InputError) as caught:
        predict_measurement(PRIOR, run)
    text = str(caught.value)
    assert "measurements.m." in text
    assert "--exclude p" in text
