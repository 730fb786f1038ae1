"""Ranks that share cores: as the replay where each has its own, bounded by work and by path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.exact import replayed_step_times
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.durations import Durations
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import predict
from flopwright.simulator.training.program import Program, program_of
from flopwright.simulator.training.replay import replay
from flopwright.simulator.training.shared_cores import SharedCores, replay_shared, shared_cores
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario

PIPELINES: tuple[dict[str, Any], ...] = (
    {"pp": 4},
    {"pp": 4, "schedule": "gpipe"},
    {"pp": 4, "schedule": "zb_h1"},
    {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
    {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"},
)


def _durations(program: Program, seed: int, send_s: float = 0.01) -> Durations:
    rng, chunks, stages = np.random.default_rng(seed), program.num_chunks, program.num_stages
    backward = rng.uniform(0.5, 3, chunks)
    return Durations(
        forward_s=rng.uniform(0.2, 2, chunks),
        backward_s=backward,
        send_s=np.full(chunks, send_s),
        reduce_s=np.zeros(stages),
        step_s=rng.uniform(0.1, 0.5, stages),
        weight_s=backward / 3,
    )


@pytest.mark.parametrize("fields", PIPELINES, ids=str)
def test_with_a_core_for_every_rank_it_is_the_replay(fields: dict[str, Any]) -> None:
    program = program_of(ParallelPlan(**fields), 8)
    durations = _durations(program, 1)
    alone = replay(program, durations)
    shared = replay_shared(program, durations, SharedCores(cores=8, ranks=8, ranks_per_stage=1))
    np.testing.assert_allclose(shared.end_s, alone.end_s, rtol=1e-9)


@given(st.integers(0, 2**31), st.sampled_from(PIPELINES), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_a_shared_step_lies_between_work_on_all_cores_and_everybody_always_at_work(
    seed: int, fields: dict[str, Any], cores: int
) -> None:
    plan = ParallelPlan(**fields)
    program = program_of(plan, 4)
    durations = _durations(program, seed)
    ranks = 4
    shared = SharedCores(cores=cores, ranks=ranks, ranks_per_stage=ranks // plan.pp)
    step = float(replay_shared(program, durations, shared).step_time_s)
    own, exchange = durations.parts(program)
    busy = [
        sum(float((own + exchange)[c.row]) for c in program.codes
            if c.stage == s and c.op in (0, 2, 6))
        for s in range(plan.pp)
    ]  # fmt: skip
    crowded = float(replay(program, durations).step_time_s)
    assert step >= np.mean(busy) * (1 - 1e-9)
    assert step >= crowded * cores / ranks - 1.0  # transfers keep their time
    assert step <= crowded * (1 + 1e-9)


def test_one_core_does_all_work_one_after_the_other() -> None:
    program = program_of(ParallelPlan(pp=2), 4)
    durations = _durations(program, 2, send_s=0.0)
    shared = SharedCores(cores=1, ranks=2, ranks_per_stage=1)
    step = float(replay_shared(program, durations, shared).step_time_s)
    # seconds are those of two ranks on one core: alone an action takes half
    work = 4 * (durations.forward_s + durations.backward_s).sum() / 2
    assert step == pytest.approx(work + durations.step_s.max(), rel=1e-6)


def _scenario(ranks: int, cores: int) -> Scenario:
    mini = load_scenario("kimi_k2_mini_2cpu_fp32")
    node = mini.cluster.node.model_copy(update={"gpus": ranks, "cores": cores})
    return mini.model_copy(update={"cluster": mini.cluster.model_copy(update={"node": node})})


def test_search_prediction_and_bound_agree_where_cores_are_shared() -> None:
    scenario = _scenario(4, 2)
    plans = [
        ParallelPlan(pp=4, micro_batch_size=2, data_parallel="none"),
        ParallelPlan(pp=2, dp_shard=2, micro_batch_size=2),
        ParallelPlan(pp=2, vpp=2, dp_shard=2, micro_batch_size=2, schedule="zb_v"),
        ParallelPlan(dp_shard=4, micro_batch_size=2),
    ]
    candidates = Candidates.from_plans(plans)
    bound = evaluate(scenario, candidates)
    exact = replayed_step_times(scenario, candidates)
    for i, plan in enumerate(plans):
        found = predict(scenario, plan)[0].metrics
        assert found.step_time_s == pytest.approx(exact[i], rel=1e-9)
        assert bound.step_time_s[i] <= exact[i] * (1 + 1e-9)
        assert sum(v[i] for v in bound.time_s.values()) == pytest.approx(bound.step_time_s[i])
        assert sum(found.time_s.values()) == pytest.approx(found.step_time_s)


def test_only_pipelines_with_more_ranks_than_cores_share_them() -> None:
    pipeline, replicas = ParallelPlan(pp=4), ParallelPlan(dp_shard=4)
    assert shared_cores(_scenario(4, 2), pipeline) is not None
    assert shared_cores(_scenario(4, 4), pipeline) is None
    assert shared_cores(_scenario(4, 2), replicas) is None
