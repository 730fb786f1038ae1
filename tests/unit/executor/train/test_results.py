from __future__ import annotations

import pytest

from flopwright.executor.launch.request import RunEntry, RunRequest
from flopwright.executor.measure.timers import StepTrace
from flopwright.executor.train.results import (
    launch_noise_floor,
    step_times,
    time_by_class,
    typical_trace,
)
from flopwright.executor.train.rounds import History
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.trace import TraceEvent
from flopwright.spec.load import load_scenario, make_plan_file


def step(rank: int, began_s: float, *rows: tuple[str, str, float, float]) -> StepTrace:
    events = tuple(TraceEvent(rank, "compute", n, c, a, b) for n, c, a, b in rows)
    return StepTrace(began_s, max(e.end_s for e in events), events)


def two_ranks(began_s: float = 0.0) -> tuple[StepTrace, ...]:
    """Rank 0 computes 0.6 s and reduces; rank 1 computes 0.2 s and waits for it."""
    return (
        step(0, began_s, ("F", "forward", 0.0, 0.6), ("REDUCE_GRAD", "dp_comm", 0.6, 0.8)),
        step(1, began_s, ("F", "forward", 0.0, 0.2), ("REDUCE_GRAD", "dp_comm", 0.2, 0.8)),
    )


def test_the_critical_rank_is_the_one_that_waits_least() -> None:
    mesh = Mesh(ParallelPlan(dp_shard=2))
    times = time_by_class([two_ranks()], mesh, 0.8)
    assert times == pytest.approx({"forward": 0.6, "dp_comm": 0.2})


def test_classes_are_scaled_to_the_step_time() -> None:
    mesh = Mesh(ParallelPlan(dp_shard=2))
    times = time_by_class([two_ranks(), two_ranks(5.0)], mesh, 0.4)
    assert times == pytest.approx({"forward": 0.3, "dp_comm": 0.1})
    assert sum(times.values()) == pytest.approx(0.4, rel=1e-12)


def test_the_typical_trace_is_the_nearest_and_starts_at_zero() -> None:
    long = (step(0, 10.0, ("F", "forward", 0.0, 3.0)), step(1, 10.5, ("F", "forward", 0.0, 1.0)))
    short = (step(0, 20.0, ("F", "forward", 0.0, 1.0)), step(1, 20.0, ("F", "forward", 0.0, 1.0)))
    trace = typical_trace([long, short], 2.5)
    assert [(e.rank, e.start_s, e.end_s) for e in trace] == [(0, 0.0, 3.0), (1, 0.5, 1.5)]


def test_the_noise_floor_compares_equal_plans_only() -> None:
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    plans = {"a": ParallelPlan(pp=2), "b": ParallelPlan(dp_shard=2), "c": ParallelPlan(pp=2)}
    request = RunRequest(
        entries=tuple(
            RunEntry(name=n, plan=make_plan_file(scenario, p, n)) for n, p in plans.items()
        ),
        device="cpu",
        steps=1,
    )
    assert launch_noise_floor(request, [1.0, 5.0, 1.2]) == pytest.approx(0.2)


def test_a_step_that_is_not_kept_is_discarded() -> None:
    # The first round's second step metered memory and has no time.
    history = History(rounds=[[9.0], [1.0, 2.0]], losses=[3.0, 2.9, 2.8, 2.7])
    times = step_times(history)
    assert times.samples_s == (1.0, 2.0)
    assert times.discarded_steps == 2
