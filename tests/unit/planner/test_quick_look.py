"""The first look: a legal plan with its exact step, never better than the whole search's."""

from __future__ import annotations

import pytest

from flopwright.planner.quick import quick_look, thinned
from flopwright.planner.ranking import order
from flopwright.planner.search import price, search
from flopwright.planner.space import legal_candidates
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario


@pytest.mark.parametrize("name", ["kimi_k2_mini_2cpu_fp32", "llama_mini_2cpu_fp32"])
def test_it_is_a_plan_of_the_search(name: str) -> None:
    scenario = load_scenario(name)
    calibration = scenario_calibration(scenario)
    quick, whole = quick_look(scenario, calibration), search(scenario, calibration)
    assert quick is not None
    assert quick.best is not None
    assert whole.best is not None
    mine, best = quick.best.prediction.metrics, whole.best.prediction.metrics
    assert mine.step_time_s >= best.step_time_s * (1 - 1e-9)
    exact, _ = predict(scenario, quick.best.plan, calibration)
    assert mine.step_time_s == exact.metrics.step_time_s
    assert quick.verdict == whole.verdict
    assert quick.method == "bounded"


def test_it_keeps_what_the_scenario_asks_for() -> None:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    search_space = scenario.search.model_copy(update={"etp": (2,)})
    asked = thinned(scenario.model_copy(update={"search": search_space}))
    assert asked.search.etp == (2,)
    assert asked.search.dp_replicate == (1,)


def test_what_hardly_ever_wins_is_left_out_and_the_best_stays() -> None:
    scenario = load_scenario("deepseek_v3_pretrain_2048gpu_h800_fp8")
    calibration = scenario_calibration(scenario)
    quick = quick_look(scenario, calibration)
    own = scenario.search
    wide = own.model_copy(
        update={"recompute_tags": (), "recompute_layers": (), "dp_replicate": (1,), "etp": (1,)}
    )
    every = legal_candidates(scenario.model_copy(update={"search": wide}), None)
    priced = price(scenario, every, calibration)
    best_s = priced.step_time_s[order(priced, scenario)[0]]
    assert quick is not None
    assert quick.best is not None
    assert quick.candidates < len(every) / 3
    mine = price(scenario, Candidates.from_plans((quick.best.plan,)), calibration)
    assert mine.step_time_s[0] <= 1.01 * best_s


def test_the_plan_is_one_that_is_replayed_at_once() -> None:
    """The plan that holds least runs thousands of micro-batches through many stages."""
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    scenario = scenario.model_copy(update={"objective": "headroom"})
    quick = quick_look(scenario, scenario_calibration(scenario))
    assert quick is not None
    assert quick.best is not None
    plan = quick.best.plan
    batches = plan.num_microbatches(scenario.workload.global_batch_size)
    assert 2 * plan.pp * plan.vpp * batches <= 20_000
    assert quick.verdict == "fits"


def test_nothing_fits() -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    gpu = scenario.cluster.node.gpu.model_copy(update={"hbm_bytes": 2**20})
    node = scenario.cluster.node.model_copy(update={"gpu": gpu})
    cluster = scenario.cluster.model_copy(update={"node": node})
    tiny = scenario.model_copy(update={"cluster": cluster})
    assert quick_look(tiny, scenario_calibration(tiny)) is None
