"""Every schedule is searched alike: the bound under the replay, replays of many as of one."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.plan.schedules.placement import CHUNKS_PER_STAGE
from flopwright.planner.exact import replayed_step_times
from flopwright.planner.search import search
from flopwright.planner.space import legal_candidates
from flopwright.simulator.training.candidates import SCHEDULES, Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import SearchSpace

K2 = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
SMALL = K2.model_copy(
    update={
        "workload": K2.workload.model_copy(update={"global_batch_size": 4096}),
        "search": SearchSpace(
            tp=(1,), pp=(8,), ep=(32,), vpp=(1, 2), zero_stage=(1,), micro_batch_size=(1,),
            recompute=("full",), recompute_layers=(), etp=(1,), dp_replicate=(1,),
        ),
    }
)  # fmt: skip
NEW = ("zb_h1", "zb_v", "dualpipe_v", "interleaved_1f1b_overlap")


def _plans() -> list[ParallelPlan]:
    shapes = [
        {"dp_shard": 256, "ep": 32, "pp": 8},
        {"dp_shard": 256, "ep": 32, "pp": 8, "recompute": "full"},
        {"dp_shard": 32, "tp": 8, "ep": 8, "pp": 8, "recompute": "selective"},
    ]
    plans = [
        ParallelPlan(**shape, zero_stage=1, schedule=s, vpp=max(CHUNKS_PER_STAGE[s][0], 1))
        for s in SCHEDULES
        for shape in shapes
    ]
    plans.append(plans[-1].model_copy(update={"data_parallel": "fsdp2"}))
    zb_v = next(p for p in plans if p.schedule == "zb_v")
    plans.append(zb_v.model_copy(update={"data_parallel": "fsdp2"}))
    return [p for p in plans if not plan_violations(p, SMALL)]


@pytest.mark.slow
def test_replays_of_every_schedule_equal_its_prediction_and_keep_its_bound() -> None:
    plans = _plans()
    assert {p.schedule for p in plans} == {*SCHEDULES}
    candidates = Candidates.from_plans(plans)
    together = replayed_step_times(SMALL, candidates)
    alone = [predict(SMALL, p, whole_trace=False)[0].metrics.step_time_s for p in plans]
    np.testing.assert_allclose(together, alone, rtol=1e-9)
    bound = evaluate(SMALL, candidates).step_time_s
    assert (bound <= together * (1 + 1e-12)).all()
    assert (bound >= together / 1.1).all()


@pytest.mark.parametrize("schedule", NEW)
def test_every_schedule_is_searched_on_gpus_and_alone_where_asked_for(schedule: str) -> None:
    searched = {SCHEDULES[i] for i in np.unique(legal_candidates(SMALL).schedule)}
    assert searched == {*SCHEDULES} - {"gpipe"}
    asked = legal_candidates(SMALL, {"schedule": schedule})
    assert {SCHEDULES[i] for i in np.unique(asked.schedule)} == {schedule}


def test_a_scenario_bounds_the_schedules_and_cpus_run_plain_ones() -> None:
    update = {"schedule": ("1f1b", "zb_v")}
    bounded = SMALL.model_copy(update={"search": SMALL.search.model_copy(update=update)})
    searched = {SCHEDULES[i] for i in np.unique(legal_candidates(bounded).schedule)}
    assert searched == {"1f1b", "zb_v"}
    mini = legal_candidates(load_scenario("kimi_k2_mini_2cpu_fp32"))
    assert {SCHEDULES[i] for i in np.unique(mini.schedule)} <= {"1f1b", "interleaved_1f1b"}


def test_a_search_for_a_schedule_ranks_its_plans() -> None:
    result = search(SMALL, top_k=1, fixed={"schedule": "zb_v"})
    best = result.ranked[0]
    assert (best.plan.schedule, best.plan.vpp) == ("zb_v", 2)
    plain = search(SMALL, top_k=1, fixed={"schedule": "1f1b"}).ranked[0]
    assert best.prediction.metrics.step_time_s < plain.prediction.metrics.step_time_s
