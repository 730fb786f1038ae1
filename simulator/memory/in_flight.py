"""How many micro-batches' activations a stage holds at its fullest."""

from __future__ import annotations

from functools import lru_cache
from typing import cast

import numpy as np
from numpy.typing import NDArray

from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import ScheduleName
from flopwright.plan.schedules.registry import stage_actions

Counts = NDArray[np.int64]

# Every list repeats after pp micro-batches a chunk; the third period is past every start
# and end effect, so more micro-batches add no new mixture of chunks.
_PERIODS = 4


def in_flight(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[Counts, ...]:
    """Returns for each stage the mixtures of chunks held, every one that another does not cover.

    A mixture is the number of micro-batches in flight of each of the stage's vpp chunks in
    model order, shape (mixtures, vpp). GPipe holds all; 1F1B at most pp - stage (arXiv
    2104.04473); the interleaved list at most 2 (pp - stage - 1) + (vpp - 1) pp + 1 chunks;
    ZB-H1 as 1F1B plus what waits for its weights' gradients (arXiv 2401.10241), ZB-V 2 pp
    and DualPipe-V 2 pp + 1 chunks on every stage (plan/schedules/in_flight.py). A
    micro-batch counts until its weights' gradients are done.
    """
    m = num_microbatches
    if schedule == "gpipe":
        return tuple(np.full((1, vpp), m) for _ in range(pp))
    if schedule == "1f1b":
        return tuple(np.full((1, vpp), min(m, pp - s)) for s in range(pp))
    return _listed(schedule, pp, vpp, min(m, _PERIODS * pp))


def enough(schedule: str, pp: int, num_microbatches: Counts) -> Counts:
    """Returns so few micro-batches as hold the same mixtures as `num_microbatches` do."""
    if schedule == "gpipe":
        return num_microbatches
    return np.minimum(num_microbatches, pp if schedule == "1f1b" else _PERIODS * pp)


@lru_cache(maxsize=4096)
def _listed(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[Counts, ...]:
    name = cast(ScheduleName, schedule)
    return tuple(
        count_in_flight(stage_actions(name, pp, vpp, s, num_microbatches), pp, vpp)
        for s in range(pp)
    )


def count_in_flight(actions: tuple[Action, ...], pp: int, vpp: int) -> Counts:
    """Returns the mixtures that running a stage's compute actions holds after each forward."""
    held = np.zeros(vpp, np.int64)
    seen: dict[tuple[int, ...], None] = {}
    for action in actions:
        local = action.chunk // pp
        if action.kind is ActionKind.FORWARD:
            held[local] += 1
            seen[tuple(int(h) for h in held)] = None
        elif action.kind in {ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT}:
            held[local] -= 1
    every = np.array(list(seen), np.int64)
    covered = np.asarray((every[:, None, :] <= every[None, :, :]).all(axis=2))
    others = covered & ~np.eye(len(every), dtype=bool)
    return np.asarray(every[~others.any(axis=1)])
