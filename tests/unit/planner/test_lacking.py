"""Where nothing fits, the answer says what is missing, of which class, and what would hold it."""

from __future__ import annotations

import re

import pytest

from flopwright.planner.lacking import more_gpus
from flopwright.planner.search import search
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.training.bounds import bounds
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.spec.load import load_model, load_scenario
from flopwright.spec.scenario import Scenario, SearchSpace

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")


def _scenario(nodes: int, host_gib: int = 2048) -> Scenario:
    node = K2.cluster.node.model_copy(update={"host_bytes": host_gib * 2**30})
    cluster = K2.cluster.model_copy(update={"num_nodes": nodes, "node": node})
    return K2.model_copy(
        update={
            "model": load_model("llama31_70b"),
            "cluster": cluster,
            "workload": K2.workload.model_copy(update={"global_batch_size": 64}),
            "search": SearchSpace(
                tp=(4, 8), pp=(1,), micro_batch_size=(1,), zero_stage=(0, 1),
                recompute=("full",), optimizer_offload=(False,), activation_offload=(False,),
            ),
        }
    )  # fmt: skip


def test_the_nearest_plans_say_what_is_missing_and_what_would_hold_them() -> None:
    scenario = _scenario(1)
    result = search(scenario, top_k=4)
    assert result.verdict == "does_not_fit"
    assert result.ranked == ()
    limit = scenario.cluster.node.gpu.hbm_bytes
    for plan in result.infeasible:
        whole = evaluate(scenario, Candidates.from_plans([plan.plan]))
        by_class = {k: int(v[plan.stage, 0]) for k, v in whole.memory_bytes.items()}
        assert plan.memory_bytes == {k: v for k, v in by_class.items() if v}
        assert sum(plan.memory_bytes.values()) == plan.peak_memory_bytes
        assert plan.missing_bytes == plan.peak_memory_bytes - limit
        largest = max(plan.memory_bytes, key=lambda k: plan.memory_bytes[k]).replace("_", " ")
        assert largest in plan.violations[0].rule
    lacks = [p.missing_bytes for p in result.infeasible]
    assert lacks == sorted(lacks)
    assert all("GPUs (" in p.violations[0].nearest_fix for p in result.infeasible[:3])


def test_the_larger_cluster_holds_what_is_said_and_a_smaller_one_does_not() -> None:
    scenario = _scenario(1)
    calibration = default_calibration(scenario.cluster.node.gpu)
    plan = search(scenario, top_k=1).infeasible[0].plan
    text = more_gpus(scenario, plan, calibration)
    found = re.match(r"(\d+) GPUs \((\d+) times as many\), (\w+) (\d+)", text)
    assert found, text
    gpus, times, axis, size = int(found[1]), int(found[2]), found[3], int(found[4])
    assert gpus == 8 * times
    name = {"dp": "dp_shard", "pp": "pp", "tp": "tp", "ep": "ep"}[axis]
    update: dict[str, int] = {name: size}
    if axis == "dp":
        update["zero_stage"] = max(1, plan.zero_stage)
    grown = plan.model_copy(update=update)
    assert grown.world_size == gpus
    limit = scenario.cluster.node.gpu.hbm_bytes
    larger = _scenario(times)
    assert bounds(larger, Candidates.from_plans([grown])).peak_bytes[0] <= limit


def test_host_memory_that_lacks_is_told_in_bytes() -> None:
    scenario = _scenario(4, host_gib=1)
    space = scenario.search.model_copy(update={"optimizer_offload": (True,), "zero_stage": (1,)})
    result = search(scenario.model_copy(update={"search": space}), top_k=2)
    assert result.verdict == "does_not_fit"
    rules = [v.rule for p in result.infeasible for v in p.violations]
    assert any("more host memory than a node has" in rule for rule in rules), rules


def test_a_hopeless_plan_says_so() -> None:
    scenario = _scenario(1)
    gpu = scenario.cluster.node.gpu.model_copy(update={"hbm_bytes": 4 * 2**30})
    node = scenario.cluster.node.model_copy(update={"gpu": gpu})
    cluster = scenario.cluster.model_copy(update={"node": node})
    tiny = scenario.model_copy(update={"cluster": cluster})
    nearest = search(tiny, top_k=1).infeasible[0]
    assert nearest.violations[0].nearest_fix.startswith("not even 32 times as many GPUs")
    assert nearest.missing_bytes > 0
    assert pytest.approx(4 * 2**30) == gpu.hbm_bytes
