"""Plans and a prediction made by hand, so that exports are tested without the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.report.metrics import Interval, Prediction, StepMetrics
from flopwright.report.trace import Trace, TraceEvent
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario

K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"


@pytest.fixture(scope="session")
def scenario() -> Scenario:
    return load_scenario(K2)


@pytest.fixture
def make(scenario: Scenario) -> Callable[..., PlanFile]:
    def build(name: str = "k2", **axes: Any) -> PlanFile:
        parallel = ParallelPlan(**axes)
        assert not plan_violations(parallel, scenario)
        return make_plan_file(scenario, parallel, name)

    return build


@pytest.fixture
def k2(make: Callable[..., PlanFile]) -> PlanFile:
    """K2's published split: 16 stages, expert groups of 16, ZeRO-1 over 128."""
    return make(pp=16, ep=16, dp_shard=128, zero_stage=1, recompute="selective")


@pytest.fixture
def prediction() -> Prediction:
    gib = 2**30
    return Prediction(
        plan_name="k2",
        metrics=StepMetrics(
            step_time_s=12.5,
            tokens_per_s=5.4e6,
            tokens_per_s_per_gpu=5.4e6 / 2048,
            model_flops_per_s_per_gpu=3.7e14,
            mfu=0.374,
            time_s={"forward": 4.0, "backward": 8.0, "idle": 0.5},
            memory_bytes=({"weights": 30 * gib, "reserved": 2 * gib}, {"weights": 20 * gib}),
        ),
        step_time_interval=Interval(low=10.0, high=16.0),
        provenance="analytic",
        calibration_id="h800-prior",
        assumptions=("tokens are routed evenly",),
    )


@pytest.fixture
def trace() -> Trace:
    return (
        TraceEvent(0, "compute", "F(0,0)", "forward", 0.0, 4.0),
        TraceEvent(1, "comm", "recv", "pp_comm", 4.0, 4.5, 1024),
    )
