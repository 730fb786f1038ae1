"""From one step to the whole run: steps, days, GPU-hours, money and energy to the token budget."""

from __future__ import annotations

from typing import Final

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from flopwright.report.metrics import Interval, Prediction
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario

_HOUR_S: Final = 3600.0
_DAY_S: Final = 86_400.0
_YEAR_S: Final = 365.25 * _DAY_S
_JOULES_PER_KWH: Final = 3.6e6


class WholeRun(Spec):
    """A training run to its token budget, without interruptions.

    Attributes:
        gpus: GPUs the plan uses, all of them paid for.
        days_interval: days at the low and the high end of the step time's interval.
        usd: None where the cluster gives no price; kwh: None where it gives no power.
    """

    steps: PositiveInt
    tokens: PositiveInt
    gpus: PositiveInt
    days: PositiveFloat
    days_interval: Interval
    gpu_hours: PositiveFloat
    usd: NonNegativeFloat | None = None
    kwh: NonNegativeFloat | None = None
    assumptions: tuple[str, ...] = ()


def whole_run(scenario: Scenario, prediction: Prediction) -> WholeRun:
    """Returns what the scenario's token budget takes at the predicted step time."""
    metrics, workload, cluster = prediction.metrics, scenario.workload, scenario.cluster
    gpus = max(1, round(metrics.tokens_per_s / metrics.tokens_per_s_per_gpu))
    seconds = workload.num_steps * metrics.step_time_s
    gpu_hours = gpus * seconds / _HOUR_S
    interval = prediction.step_time_interval
    price, power = cluster.price_usd_per_gpu_h, cluster.node.gpu.power_watts
    assumed = ["no failures, restarts, evaluation or checkpoint pauses"]
    if power is not None:
        assumed.append("energy: every GPU at its rated power; hosts and network not counted")
    return WholeRun(
        steps=workload.num_steps,
        tokens=workload.num_steps * workload.tokens_per_step,
        gpus=gpus,
        days=seconds / _DAY_S,
        days_interval=Interval(
            low=workload.num_steps * interval.low / _DAY_S,
            high=workload.num_steps * interval.high / _DAY_S,
            probability=interval.probability,
        ),
        gpu_hours=gpu_hours,
        usd=None if price is None else price * gpu_hours,
        kwh=None
        if power is None
        else power * cluster.power_usage_effectiveness * gpu_hours * _HOUR_S / _JOULES_PER_KWH,
        assumptions=tuple(assumed),
    )


def days_at_rate(flops: float, flops_per_s_per_gpu: float, gpus: int) -> float:
    """Returns the days `gpus` GPUs need for `flops` at a sustained rate each."""
    return flops / (flops_per_s_per_gpu * gpus) / _DAY_S


def gpu_years_at_rate(flops: float, flops_per_s_per_gpu: float) -> float:
    """Returns the years (of 365.25 days) one GPU needs for `flops` at a sustained rate."""
    return flops / flops_per_s_per_gpu / _YEAR_S


def sustained_flops_per_s_per_gpu(flops: float, gpu_hours: float) -> float:
    """Returns the model FLOP/s a GPU sustained over a run that took `gpu_hours`."""
    return flops / (gpu_hours * _HOUR_S)
