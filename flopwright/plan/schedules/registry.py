"""Schedules by name: one file a schedule, one line here, one contract test for all."""

from __future__ import annotations

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action
from flopwright.plan.schedules.gpipe import gpipe
from flopwright.plan.schedules.interleaved_1f1b import interleaved_1f1b
from flopwright.plan.schedules.one_f_one_b import one_f_one_b


def compute_actions(plan: ParallelPlan, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns each stage's compute actions in the order its rank runs them."""
    if plan.schedule == "interleaved_1f1b":
        return tuple(
            interleaved_1f1b(s, plan.pp, num_microbatches, plan.vpp) for s in range(plan.pp)
        )
    build = {"1f1b": one_f_one_b, "gpipe": gpipe}[plan.schedule]
    return tuple(build(s, plan.pp, num_microbatches) for s in range(plan.pp))
