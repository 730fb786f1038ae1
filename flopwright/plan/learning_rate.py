"""The learning rate at a step: the same function prices phases and drives the optimizer."""

from __future__ import annotations

import math

from flopwright.spec.workload import LearningRate, Workload


def learning_rate_at(step: int, workload: Workload) -> float:
    """Returns the learning rate of optimizer step `step` (0-based)."""
    lr = workload.learning_rate
    hold = 0 if lr.hold_until_tokens is None else workload.steps_within(lr.hold_until_tokens)
    return _at(step, lr, workload.num_steps, hold)


def _at(step: int, lr: LearningRate, num_steps: int, hold_steps: int) -> float:
    if step < lr.warmup_steps:
        return lr.peak * (step + 1) / lr.warmup_steps
    if lr.kind == "constant":
        return lr.peak
    start = lr.warmup_steps
    if lr.kind == "wsd":
        start = hold_steps
        if step < start:
            return lr.peak
    progress = min(1.0, (step - start) / max(1, num_steps - start))
    if lr.kind == "linear":
        return lr.peak + (lr.final - lr.peak) * progress
    return lr.final + (lr.peak - lr.final) * 0.5 * (1 + math.cos(math.pi * progress))
