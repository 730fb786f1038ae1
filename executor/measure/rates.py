"""From a step's time to tokens a second, model FLOP/s and MFU: one convention for every figure.

Model FLOPs count products of weights and of attention once, forward and backward, without
what is computed again; causal attention is not halved (spec/flops.py). The peak is the dense
one of the cluster file for the format that the run computes in.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwright.spec.flops import model_flops_per_token
from flopwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Rates of a step of `world_size` processors."""

    tokens_per_s: float
    tokens_per_s_per_gpu: float
    model_flops_per_s_per_gpu: float
    mfu: float


def rates(
    scenario: Scenario, world_size: int, step_time_s: float, sequences: int | None = None
) -> Rates:
    """Returns the rates of a step that took `step_time_s`.

    Args:
        sequences: of the step; None for the full batch.
    """
    workload = scenario.workload
    batch = workload.global_batch_size if sequences is None else sequences
    tokens_per_s = batch * workload.seq_len / step_time_s
    per_gpu = tokens_per_s / world_size
    flops_per_s = per_gpu * model_flops_per_token(scenario.model, workload.seq_len)
    peaks = scenario.cluster.node.gpu.peak_flops_per_s
    peak = peaks.get(workload.precision.compute) or max(peaks.values())
    return Rates(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=per_gpu,
        model_flops_per_s_per_gpu=flops_per_s,
        mfu=flops_per_s / peak,
    )
