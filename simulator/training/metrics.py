"""A step's time as the numbers people compare: tokens, FLOP/s, MFU and HFU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from flopwright.errors import InputError, Violation
from flopwright.report.metrics import StepMetrics
from flopwright.spec.flops import hardware_flops_per_token, model_flops_per_token
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario


def compute_peak_flops_per_s(scenario: Scenario) -> float:
    """Returns the dense peak of the compute dtype, which MFU is measured against.

    Raises:
        InputError: the processor's peak for that dtype is not known.
    """
    gpu, dtype = scenario.cluster.node.gpu, scenario.workload.precision.compute
    peak = gpu.peak_flops_per_s.get(dtype)
    if peak is None:
        raise InputError(
            Violation(
                field=f"cluster.node.gpu.peak_flops.{dtype}",
                rule=f"{gpu.name} has no peak for the compute dtype {dtype}",
                nearest_fix=f"known: {', '.join(sorted(gpu.peak_flops_per_s))}",
            )
        )
    return peak


def flops_by_convention(
    scenario: Scenario, world_size: int, step_time_s: float
) -> dict[str, float]:
    """Returns the FLOP/s of one GPU by reporting convention (Prediction.flops_per_s_per_gpu)."""
    rate = scenario.workload.tokens_per_step / (step_time_s * world_size)
    per_token = _flops_per_token(scenario.model, scenario.workload.seq_len)
    return {name: flops * rate for name, flops in per_token}


@lru_cache(maxsize=256)
def _flops_per_token(model: ModelSpec, seq_len: int) -> tuple[tuple[str, float], ...]:
    return (
        ("causal_half", model_flops_per_token(model, seq_len)),
        ("full", model_flops_per_token(model, seq_len, "full")),
        ("full_recompute", hardware_flops_per_token(model, seq_len)),
    )


def step_metrics(
    scenario: Scenario,
    world_size: int,
    step_time_s: float,
    *,
    time_s: Mapping[str, float] | None = None,
    memory_bytes: Sequence[Mapping[str, int]] = (),
    executed_flops: float | None = None,
) -> StepMetrics:
    """Returns the metrics of one optimizer step on `world_size` ranks.

    Model FLOPs count causal attention at half its square (spec/flops.py, "causal_half").

    Args:
        executed_flops: matrix-product FLOPs of the whole step on all ranks, for HFU.
    """
    workload = scenario.workload
    tokens = workload.tokens_per_step
    per_gpu = tokens * dict(_flops_per_token(scenario.model, workload.seq_len))["causal_half"]
    per_gpu /= step_time_s * world_size
    peak = compute_peak_flops_per_s(scenario)
    return StepMetrics(
        step_time_s=step_time_s,
        tokens_per_s=tokens / step_time_s,
        tokens_per_s_per_gpu=tokens / step_time_s / world_size,
        model_flops_per_s_per_gpu=per_gpu,
        mfu=per_gpu / peak,
        hfu=None if executed_flops is None else executed_flops / (step_time_s * world_size) / peak,
        time_s=dict(time_s or {}),
        memory_bytes=tuple(dict(m) for m in memory_bytes),
    )
