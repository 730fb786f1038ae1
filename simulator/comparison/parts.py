"""What each stage, kernel class and link of a plan is predicted to take in one step.

These are busy seconds, which add up whatever waits for whatever: each is the sum over the
actions that a stage carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flopwright.ops import Array
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import plan_costs
from flopwright.simulator.training.stages import PipelineCosts
from flopwright.spec.scenario import Scenario

COMPUTE: frozenset[str] = frozenset({"forward", "backward", "recompute", "optimizer"})
# What kernels are seen of; the optimizer's are a time class of their own.
_OF_KERNELS = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """One step in parts.

    Attributes:
        time_s: by stage, seconds by time class.
        kernel_s: by stage, seconds of compute by kernel class (training/kernels.py) and
            "optimizer"; they sum to the compute of `time_s`.
        messages_s: seconds of all messages between two stages (sender, receiver).
        norm_s: summing the gradient norm over all ranks, part of every stage's "dp_comm".
    """

    time_s: tuple[Mapping[str, float], ...]
    kernel_s: tuple[Mapping[str, float], ...]
    messages_s: Mapping[tuple[int, int], float]
    norm_s: float


def predicted_parts(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> Parts:
    """Returns what the calibration makes of the plan's step."""
    costs = plan_costs(scenario, plan, calibration)
    m = plan.num_microbatches(scenario.workload.global_batch_size)
    times = tuple(_stage_time(costs, stage, m) for stage in range(plan.pp))
    return Parts(
        time_s=times,
        kernel_s=tuple(_stage_kernels(costs, stage, times[stage]) for stage in range(plan.pp)),
        messages_s=_messages(costs, plan, m),
        norm_s=float(costs.end.norm_s[0]),
    )


def _stage_time(costs: PipelineCosts, stage: int, m: int) -> dict[str, float]:
    chunks = costs.stages[:, stage]
    out: dict[str, float] = {}

    def add(name: str, seconds: Array | float) -> None:
        total = float(np.sum(seconds))
        if total > 0:
            out[name] = out.get(name, 0.0) + total

    for classes in (costs.forward, costs.backward):
        for name, values in classes.items():
            add(name, m * values[chunks, 0])
    end = costs.end
    add("dp_comm", end.reduce_s[stage, 0] + end.gather_s[stage, 0] + end.norm_s[0])
    add("optimizer", end.update_s[stage, 0])
    add("offload", end.offload_s[stage, 0])
    add("host", end.host_s)
    return out


def _stage_kernels(
    costs: PipelineCosts, stage: int, time_s: Mapping[str, float]
) -> dict[str, float]:
    """Returns kernel classes as shares of the stage's compute, so that they sum to it."""
    chunks = costs.stages[:, stage]
    raw = {name: float(values[chunks, 0].sum()) for name, values in costs.kernel_s.items()}
    compute = sum(time_s.get(c, 0.0) for c in _OF_KERNELS)
    whole = sum(raw.values())
    out = {k: v * compute / whole for k, v in raw.items() if v > 0} if whole else {}
    if time_s.get("optimizer"):
        out["optimizer"] = time_s["optimizer"]
    return out


def _messages(costs: PipelineCosts, plan: ParallelPlan, m: int) -> dict[tuple[int, int], float]:
    out: dict[tuple[int, int], float] = {}
    send_s = costs.send_s[:, 0]
    for chunk in range(len(send_s) - 1):
        here, there = stage_of_chunk(plan, chunk), stage_of_chunk(plan, chunk + 1)
        if here != there and send_s[chunk] > 0:
            for way in ((here, there), (there, here)):
                out[way] = out.get(way, 0.0) + m * float(send_s[chunk])
    return out


def stage_of_rank(plan: ParallelPlan, rank: int) -> int:
    """Returns the pipeline stage that a rank belongs to."""
    return rank // (plan.dp * plan.cp * plan.tp)
