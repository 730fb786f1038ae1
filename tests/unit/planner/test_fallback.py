"""Plans for lost nodes: legal, of the same batch, and what planning that size by hand gives."""

import itertools
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import plan_violations
from flopwright.planner.fallback import fallbacks
from flopwright.planner.search import search
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.cluster import LinkSpec
from flopwright.spec.load import dump_yaml, load_plan, load_scenario, make_plan_file
from flopwright.spec.phases import BatchRamp
from flopwright.spec.scenario import Scenario

MINI = load_scenario("kimi_k2_mini_2cpu_fp32")
CALIBRATION = default_calibration(MINI.cluster.node.gpu)


def _nodes(count: int) -> Scenario:
    link = LinkSpec(name="ether", bandwidth="1 GB/s", latency="200 us", source="assumed")
    cluster = MINI.cluster.model_copy(update={"network": link, "num_nodes": count})
    space = MINI.search.model_copy(update={"micro_batch_size": (1,), "zero_stage": (0, 1)})
    return MINI.model_copy(update={"cluster": cluster, "search": space})


def _planned(scenario: Scenario) -> tuple[PlanFile, float]:
    best = search(scenario, CALIBRATION, 1).best
    assert best is not None
    plan = make_plan_file(scenario, best.plan, best.plan.label())
    return plan, best.prediction.metrics.step_time_s


def test_each_is_the_plan_of_its_size_with_the_same_batch() -> None:
    scenario = _nodes(4)
    plan, step_s = _planned(scenario)
    found = fallbacks(plan, step_s, CALIBRATION)
    assert found
    for f in found:
        smaller = f.plan.scenario
        assert not plan_violations(f.plan.parallel, smaller)
        assert smaller.workload == scenario.workload
        assert smaller.model == scenario.model
        assert f.ranks == f.plan.parallel.world_size == 2 * f.nodes < plan.parallel.world_size
        assert f.nodes_lost == 4 - f.nodes
        metrics = predict(smaller, f.plan.parallel, CALIBRATION)[0].metrics
        assert f.step_time_s == pytest.approx(metrics.step_time_s)
        assert f.peak_memory_bytes == metrics.peak_memory_bytes
        assert f.slower == pytest.approx(metrics.step_time_s / step_s - 1)
        assert f.plan.predicted is not None
    for larger, smaller_one in itertools.pairwise(found):
        assert larger.ranks > smaller_one.ranks
        assert larger.step_time_s < smaller_one.step_time_s


def test_no_size_between_two_is_faster_than_the_smaller() -> None:
    """By planning every size: what was left out is no better than the next that is named."""
    scenario = _nodes(4)
    plan, step_s = _planned(scenario)
    named = {f.nodes: f.step_time_s for f in fallbacks(plan, step_s, CALIBRATION)}
    kept = {n: getattr(plan.parallel, n) for n in ("tp", "cp", "micro_batch_size", "zero_stage")}
    for nodes in (3, 2, 1):
        smaller = plan.scenario.model_copy(
            update={"cluster": plan.scenario.cluster.model_copy(update={"num_nodes": nodes})}
        )
        try:
            best = search(smaller, CALIBRATION, 1, fixed=kept).best
        except InputError:
            assert nodes not in named
            continue
        assert best is not None
        seconds = best.prediction.metrics.step_time_s
        below = [s for n, s in named.items() if n <= nodes]
        assert min(below) <= seconds * (1 + 1e-9)


def test_a_lone_node_falls_back_on_fewer_of_its_gpus() -> None:
    plan, step_s = _planned(_nodes(1))
    (one,) = fallbacks(plan, step_s, CALIBRATION)
    assert (one.ranks, one.nodes, one.nodes_lost) == (1, 1, 0)
    assert one.plan.scenario.cluster.num_gpus == 1
    assert fallbacks(one.plan, one.step_time_s, CALIBRATION) == ()


def test_a_ramp_is_run_at_every_batch() -> None:
    scenario = _nodes(4)
    ramp = BatchRamp(start=4, increment=4, tokens=10 * MINI.workload.tokens_per_step)
    workload = scenario.workload.model_copy(update={"batch_ramp": ramp})
    scenario = scenario.model_copy(update={"workload": workload})
    plan, step_s = _planned(scenario)
    found = fallbacks(plan, step_s, CALIBRATION)
    assert found
    for f in found:
        for batch in (4, 8, 12, 16):
            small = workload.model_copy(update={"global_batch_size": batch, "batch_ramp": None})
            at = f.plan.scenario.model_copy(update={"workload": small})
            assert not plan_violations(f.plan.parallel, at)


@pytest.mark.slow
def test_no_more_than_asked_for_and_none_that_lacks_memory(tmp_path: Path) -> None:
    plan, step_s = _planned(_nodes(4))
    assert len(fallbacks(plan, step_s, CALIBRATION, count=1)) == 1
    node = plan.scenario.cluster.node
    tight = min(
        predict(plan.scenario, plan.parallel, CALIBRATION)[0].metrics.peak_memory_bytes,
        node.gpu.hbm_bytes,
    )
    gpu = node.gpu.model_copy(update={"hbm_bytes": tight})
    cluster = plan.scenario.cluster.model_copy(
        update={"node": node.model_copy(update={"gpu": gpu})}
    )
    small = make_plan_file(
        plan.scenario.model_copy(update={"cluster": cluster}), plan.parallel, "tight"
    )
    for f in fallbacks(small, step_s, CALIBRATION):
        assert f.peak_memory_bytes <= tight
    path = tmp_path / "f.yaml"
    first = fallbacks(plan, step_s, CALIBRATION)[0]
    path.write_text(dump_yaml(first.plan))
    assert load_plan(path) == first.plan
