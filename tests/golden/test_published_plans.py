"""The plans of published runs: feasible, their states by stage, and DeepSeek-V3's GPU-hours."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flopwright.cli import app
from flopwright.planner.families import family_gpu_hours, published_family
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.load import load_scenario

K2 = "kimi_k2_pretrain_2048gpu_h800_bf16"
V3 = "deepseek_v3_pretrain_2048gpu_h800_fp8"
LLAMA = "llama31_405b_pretrain_16384gpu_h100_bf16"


def test_deepseek_v3_takes_the_published_gpu_hours_within_a_tenth() -> None:
    """2.664M H800-hours for 14.8T tokens, arXiv 2412.19437, table 1; nothing is fitted to it."""
    scenario, family = load_scenario(V3), published_family(V3)
    plan = family.plan_on(scenario)
    prediction, _ = predict(scenario, plan, scenario_calibration(scenario), whole_trace=False)
    hours = family_gpu_hours(family, scenario, prediction.metrics.step_time_s)
    assert family.gpu_hours == 2.664e6
    assert hours == pytest.approx(family.gpu_hours, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "least", "share"),
    [(K2, 100_000, 0.01), (V3, 100_000, 0.01), (LLAMA, 40_000, 0.1)],
)
def test_a_published_plan_fits_and_every_better_one_has_its_reason(
    name: str, least: int, share: float
) -> None:
    done = CliRunner().invoke(app, ["plan", name, "--published", "--top", "1", "--json"])
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    (found,) = data["also"]
    assert data["result"]["proved"]
    assert data["result"]["candidates"] >= least
    assert found["fits"]
    assert found["proved"]
    assert len(found["prediction"]["metrics"]["memory_bytes"]) == 16
    assert found["rank"] == 1 + len(found["better"])
    assert all(b["reason"] and b["gain"] > 0 for b in found["better"])
    assert found["plans_before"] / found["plans"] < share
