"""Schedules by name: one file a schedule, one line here, one contract test for all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action
from flopwright.plan.schedules.dualpipe_v import dualpipe_v
from flopwright.plan.schedules.gpipe import gpipe
from flopwright.plan.schedules.interleaved_1f1b import interleaved_1f1b
from flopwright.plan.schedules.one_f_one_b import one_f_one_b
from flopwright.plan.schedules.placement import ScheduleName
from flopwright.plan.schedules.zb_h1 import zb_h1
from flopwright.plan.schedules.zb_v import zb_v

# (stage, pp, num_microbatches) -> compute actions; those in _CHUNKED also take vpp.
_BUILDERS: Final[dict[ScheduleName, Callable[..., tuple[Action, ...]]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
    "interleaved_1f1b_overlap": partial(interleaved_1f1b, overlap=True),
}
_CHUNKED: Final = frozenset({"interleaved_1f1b", "interleaved_1f1b_overlap", "zb_h1"})


def stage_actions(
    schedule: ScheduleName, pp: int, vpp: int, stage: int, num_microbatches: int
) -> tuple[Action, ...]:
    """Returns the compute actions of one stage in the order its rank runs them."""
    sizes = (pp, num_microbatches, vpp) if schedule in _CHUNKED else (pp, num_microbatches)
    return _BUILDERS[schedule](stage, *sizes)


def compute_actions(plan: ParallelPlan, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns each stage's compute actions in the order its rank runs them."""
    return tuple(
        stage_actions(plan.schedule, plan.pp, plan.vpp, stage, num_microbatches)
        for stage in range(plan.pp)
    )
