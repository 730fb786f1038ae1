"""The update phase: the training simulator's step on a batch of sequences of many lengths.

Packed micro-batches hold whole sequences. What a sequence of x tokens costs is linear in x
but for attention, which is quadratic: a batch costs what as many tokens cost in sequences of
s* = sum x^2 / sum x tokens each (the length of the sequence that a token of the batch is in,
on average). Two step times of the simulator at s*, with different numbers of micro-batches,
give seconds a micro-batch and seconds a step; a mini-batch pays both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwright.errors import InputError
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.plan.schedules.placement import fewest_microbatches, in_rounds
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.rollouts.weight_sync import switch_seconds
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.evaluate import evaluate
from flopwright.simulator.training.predict import plan_costs
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.flops import model_flops_per_token
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import num_params
from flopwright.spec.rollouts.layout import UpdatePhase
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

Ints = npt.NDArray[np.int64]
# Weights and gradients (2 B each) and AdamW's master copy and two moments (4 B each).
STATE_BYTES_PER_PARAM = 16.0
WEIGHT_BYTES_PER_PARAM = 2.0
# FLOPs of a forward pass over those of forward and backward.
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """Seconds of the update phase.

    Attributes:
        update_s: all mini-batches; log_prob_s: the forward-only passes before them.
        load_s: moving state between host and GPUs around the update; it is part of neither.
        tokens_per_s: trained tokens over update_s.
        sequence_tokens: s*.
        assumptions: what was taken for granted.
    """

    update_s: float
    log_prob_s: float
    load_s: float
    tokens_per_s: float
    sequence_tokens: int
    assumptions: tuple[str, ...]


def representative_tokens(tokens: Ints) -> int:
    """Returns s* = sum x^2 / sum x of sequences of x tokens, rounded, at least 1."""
    values = tokens.astype(np.float64).ravel()
    return max(1, round(float((values**2).sum() / values.sum())))


def update_times(
    model: ModelSpec,
    cluster: ClusterSpec,
    phase: UpdatePhase,
    tokens: Ints,
    calibration: Calibration | None = None,
) -> UpdateTimes:
    """Returns the seconds of an update on sequences of these tokens (prompt and response).

    Args:
        tokens: of each sequence of the step, all mini-batches together.
        calibration: None takes the GPU's prior under `phase.stack`.

    Raises:
        InputError: every rule that the plan breaks, or an unknown stack.
    """
    total = float(tokens.sum()) * (1 + phase.ptx_share)
    star = _divisible(representative_tokens(tokens), phase.plan)
    load_s = _load_seconds(model, cluster, phase)
    if phase.mfu is not None:
        return _by_mfu(model, cluster, phase, total, star, load_s)
    step = _micro_batches(phase, total / phase.mini_batches, star)
    scenario = _scenario(model, cluster, phase, star, step)
    found = calibration or scenario_calibration(scenario)
    fixed_s, micro_s, notes = _law(scenario, phase.plan, step, found)
    mini_s = fixed_s + micro_s * step.count * step.fill
    passes = len(phase.log_prob)
    forward_s = _forward_seconds(scenario, phase.plan, step, found) if passes else 0.0
    log_prob_s = forward_s * step.fill * phase.mini_batches * passes
    log_prob_s = log_prob_s * phase.overhead + _teacher_seconds(model, cluster, phase)
    update_s = mini_s * phase.mini_batches * phase.overhead
    return UpdateTimes(
        update_s=update_s,
        log_prob_s=log_prob_s,
        load_s=load_s,
        tokens_per_s=total / update_s,
        sequence_tokens=star,
        assumptions=(f"packed sequences of {star} tokens stand for the batch's lengths", *notes),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A mini-batch as the simulator runs it.

    Attributes:
        size: sequences of s* a micro-batch; count: micro-batches of a data-parallel rank.
        fill: tokens of the mini-batch over those of size * count * dp sequences.
    """

    size: int
    count: int
    fill: float


def _micro_batches(phase: UpdatePhase, mini_tokens: float, star: int) -> _Step:
    plan = phase.plan
    sequences = mini_tokens / plan.dp / star  # of s*, of one data-parallel rank
    if phase.micro_batch_tokens is None:
        most = float(plan.micro_batch_size)
    else:
        most = max(1.0, phase.micro_batch_tokens / star)
    count = max(1, fewest_microbatches(plan.schedule, plan.pp), math.ceil(sequences / most - 1e-9))
    if in_rounds(plan.schedule, plan.vpp):
        count = -(-count // plan.pp) * plan.pp
    size = max(1, round(sequences / count))
    return _Step(size=size, count=count, fill=sequences / (size * count))


def _divisible(star: int, plan: ParallelPlan) -> int:
    """Rounds a length so that context and tensor parallel ranks get whole shares."""
    unit = plan.cp * plan.tp * 2
    return max(unit, round(star / unit) * unit)


def _scenario(
    model: ModelSpec, cluster: ClusterSpec, phase: UpdatePhase, star: int, step: _Step
) -> Scenario:
    count = step.size * step.count * phase.plan.dp
    longer = model.model_copy(update={"max_seq_len": max(model.max_seq_len, star)})
    return Scenario(
        name="update",
        model=longer,
        cluster=cluster,
        workload=Workload(
            seq_len=star, global_batch_size=count, total_tokens=f"{star * count * 10_000}"
        ),
        stack=phase.stack,
    )


def _law(
    scenario: Scenario, plan: ParallelPlan, step: _Step, calibration: Calibration
) -> tuple[float, float, tuple[str, ...]]:
    """Returns (seconds a step, seconds a micro-batch, assumptions) around `step.count`."""
    times = []
    for count in (step.count, step.count + plan.pp):
        sized = plan.model_copy(update={"micro_batch_size": step.size})
        batch = step.size * count * plan.dp
        workload = scenario.workload.model_copy(update={"global_batch_size": batch})
        here = scenario.model_copy(update={"workload": workload})
        broken = plan_violations(sized, here)
        if broken:
            raise InputError(broken)
        result = evaluate(here, Candidates.from_plans([sized]), calibration)
        times.append(float(result.step_time_s[0]))
        notes = result.assumptions
    micro_s = (times[1] - times[0]) / plan.pp
    return times[0] - micro_s * step.count, micro_s, notes


def _forward_seconds(
    scenario: Scenario, plan: ParallelPlan, step: _Step, calibration: Calibration
) -> float:
    """Returns the seconds of a forward pass over a mini-batch, a pipeline of one direction.

    All stages once, and (count - 1) times the slowest: GPipe's forward half.
    """
    sized = plan.model_copy(update={"micro_batch_size": step.size, "recompute": "none"})
    costs = plan_costs(scenario, sized, calibration)
    by_stage = costs.forward_s[costs.stages, 0].sum(axis=0)
    hops = float(costs.send_s[:, 0].sum())
    return float(by_stage.sum()) + hops + (step.count - 1) * float(by_stage.max())


def _by_mfu(
    model: ModelSpec, cluster: ClusterSpec, phase: UpdatePhase, total: float, star: int,
    load_s: float,
) -> UpdateTimes:  # fmt: skip
    assert phase.mfu is not None
    peak = cluster.node.gpu.peak_flops_per_s["bf16"] * phase.gpus
    flops = model_flops_per_token(model, star) * total
    update_s = flops / (peak * phase.mfu)
    log_prob_s = len(phase.log_prob) * update_s * _FORWARD_SHARE
    return UpdateTimes(
        update_s=update_s,
        log_prob_s=log_prob_s,
        load_s=load_s,
        tokens_per_s=total / update_s,
        sequence_tokens=star,
        assumptions=(f"a measured MFU of {phase.mfu:g}, forward passes included at a third",),
    )


def _load_seconds(model: ModelSpec, cluster: ClusterSpec, phase: UpdatePhase) -> float:
    """Returns the seconds of bringing state from the host and taking it back."""
    if not phase.state_on_host:
        return 0.0
    each = num_params(model) * STATE_BYTES_PER_PARAM / phase.gpus
    return 2 * switch_seconds(each, cluster)


def _teacher_seconds(model: ModelSpec, cluster: ClusterSpec, phase: UpdatePhase) -> float:
    """Returns what streaming a teacher's weights from the host adds, once a pass."""
    if "teacher" not in phase.log_prob:
        return 0.0
    each = num_params(model) * WEIGHT_BYTES_PER_PARAM / phase.gpus
    return switch_seconds(each, cluster)
