"""From a step to the run: every figure by hand on round numbers."""

import pytest

from flopwright.planner.whole_run import (
    days_at_rate,
    gpu_years_at_rate,
    sustained_flops_per_s_per_gpu,
    whole_run,
)
from flopwright.report.metrics import Interval, Prediction, StepMetrics
from flopwright.spec.load import load_scenario
from flopwright.spec.scenario import Scenario


def _scenario(**cluster: object) -> Scenario:
    scenario = load_scenario("kimi_k2_pretrain_2048gpu_h800_bf16")
    return scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update=cluster)})


def _prediction(step_time_s: float, gpus: int) -> Prediction:
    tokens_per_s = 2**26 / step_time_s
    return Prediction(
        plan_name="p",
        metrics=StepMetrics(
            step_time_s=step_time_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / gpus,
            model_flops_per_s_per_gpu=1.0,
            mfu=0.3,
        ),
        step_time_interval=Interval(low=step_time_s / 2, high=step_time_s * 2),
        provenance="analytic",
    )


def test_k2_at_sixteen_seconds_a_step() -> None:
    run = whole_run(_scenario(), _prediction(16.0, 2048))
    assert run.steps == 230_968
    assert run.gpus == 2048
    assert run.days == pytest.approx(230_968 * 16 / 86_400)
    assert run.days_interval.low == pytest.approx(run.days / 2)
    assert run.days_interval.high == pytest.approx(run.days * 2)
    assert run.gpu_hours == pytest.approx(run.days * 24 * 2048)
    assert run.usd == pytest.approx(2.0 * run.gpu_hours)
    assert run.kwh == pytest.approx(0.7 * run.gpu_hours)  # 700 W a GPU


def test_a_plan_on_half_the_cluster_pays_for_half() -> None:
    full = whole_run(_scenario(), _prediction(16.0, 2048))
    half = whole_run(_scenario(), _prediction(16.0, 1024))
    assert half.gpu_hours == pytest.approx(full.gpu_hours / 2)
    assert half.days == full.days


def test_unknown_price_and_power_stay_unknown() -> None:
    scenario = _scenario(price_usd_per_gpu_h=None)
    node = scenario.cluster.node
    dark = node.model_copy(update={"gpu": node.gpu.model_copy(update={"power_watts": None})})
    scenario = scenario.model_copy(
        update={"cluster": scenario.cluster.model_copy(update={"node": dark})}
    )
    run = whole_run(scenario, _prediction(16.0, 2048))
    assert run.usd is None
    assert run.kwh is None


def test_power_usage_effectiveness_multiplies_energy() -> None:
    plain = whole_run(_scenario(), _prediction(16.0, 2048))
    hot = whole_run(_scenario(power_usage_effectiveness=1.5), _prediction(16.0, 2048))
    assert plain.kwh is not None
    assert hot.kwh == pytest.approx(1.5 * plain.kwh)


def test_rates_are_inverses() -> None:
    flops, rate, gpus = 3.0e24, 4.0e14, 2048
    days = days_at_rate(flops, rate, gpus)
    assert gpu_years_at_rate(flops, rate) == pytest.approx(days * gpus / 365.25)
    assert sustained_flops_per_s_per_gpu(flops, days * 24 * gpus) == pytest.approx(rate)
