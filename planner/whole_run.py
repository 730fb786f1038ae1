"""From one step to the whole run: steps, days, GPU-hours, money and energy to the token budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from flopwright.report.metrics import Interval, Prediction
from flopwright.spec.base import Spec
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.scenario import Scenario

HOUR_S: Final = 3600.0
DAY_S: Final = 86_400.0
_YEAR_S: Final = 365.25 * DAY_S
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


def whole_run(
    scenario: Scenario,
    prediction: Prediction,
    smaller: Mapping[int, Prediction] | None = None,
) -> WholeRun:
    """Returns what the scenario's token budget takes at the predicted step time.

    Args:
        scenario: of one phase; later ones are not counted.
        prediction: of a step of the full batch.
        smaller: by number of sequences, of the steps of a ramp; a batch without one is taken
            to last as long as the full one.
    """
    metrics, workload, cluster = prediction.metrics, scenario.workload, scenario.cluster
    gpus = max(1, round(metrics.tokens_per_s / metrics.tokens_per_s_per_gpu))
    of_batch = {**(smaller or {}), workload.global_batch_size: prediction}
    used = [(level, of_batch.get(level.batch, prediction)) for level in workload.batch_levels]
    seconds = sum(level.steps * p.metrics.step_time_s for level, p in used)
    gpu_hours = gpus * seconds / HOUR_S
    price = cluster.price_usd_per_gpu_h
    return WholeRun(
        steps=workload.num_steps,
        tokens=sum(level.steps * level.batch for level, _ in used) * workload.seq_len,
        gpus=gpus,
        days=seconds / DAY_S,
        days_interval=Interval(
            low=sum(level.steps * p.step_time_interval.low for level, p in used) / DAY_S,
            high=sum(level.steps * p.step_time_interval.high for level, p in used) / DAY_S,
            probability=prediction.step_time_interval.probability,
        ),
        gpu_hours=gpu_hours,
        usd=None if price is None else price * gpu_hours,
        kwh=energy_kwh(cluster, gpu_hours),
        assumptions=_assumptions(scenario, of_batch),
    )


def energy_kwh(cluster: ClusterSpec, gpu_hours: float) -> float | None:
    """Returns the energy of so many GPU-hours, cooling and losses (PUE) with it.

    None where the GPU's power is not known.
    """
    power = cluster.node.gpu.power_watts
    if power is None:
        return None
    return power * cluster.power_usage_effectiveness * gpu_hours * HOUR_S / _JOULES_PER_KWH


def _assumptions(scenario: Scenario, of_batch: Mapping[int, Prediction]) -> tuple[str, ...]:
    cluster, workload = scenario.cluster, scenario.workload
    texts = ["no failures, restarts, evaluation or checkpoint pauses"]
    power = cluster.node.gpu.power_watts
    if power is not None:
        pue = cluster.power_usage_effectiveness
        texts.append(
            f"energy: every GPU at its rated power ({power:,.0f} W), times a power usage "
            f"effectiveness of {pue:.3g}; hosts and network not counted"
        )
    unpriced = [level.batch for level in workload.batch_levels if level.batch not in of_batch]
    if unpriced:
        texts.append(
            "a step of a smaller batch of the ramp lasts as long as one of the full batch"
        )
    if workload.later_phases:
        names = ", ".join(phase.name for phase in workload.later_phases)
        texts.append(f"the later phases ({names}) are not counted: plan --whole-run counts them")
    return tuple(texts)


def days_at_rate(flops: float, flops_per_s_per_gpu: float, gpus: int) -> float:
    """Returns the days `gpus` GPUs need for `flops` at a sustained rate each."""
    return flops / (flops_per_s_per_gpu * gpus) / DAY_S


def gpu_years_at_rate(flops: float, flops_per_s_per_gpu: float) -> float:
    """Returns the years (of 365.25 days) one GPU needs for `flops` at a sustained rate."""
    return flops / flops_per_s_per_gpu / _YEAR_S


def sustained_flops_per_s_per_gpu(flops: float, gpu_hours: float) -> float:
    """Returns the model FLOP/s a GPU sustained over a run that took `gpu_hours`."""
    return flops / (gpu_hours * HOUR_S)
