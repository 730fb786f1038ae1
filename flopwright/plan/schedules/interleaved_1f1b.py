"""Interleaved 1F1B (arXiv 2104.04473, 2.2): each rank holds vpp chunks, a smaller bubble.

Chunk c of the model lives on stage c mod pp. Micro-batches go through a rank's chunks in
groups of pp.
"""

from __future__ import annotations

from flopwright.plan.schedules.actions import Action, ActionKind


def interleaved_1f1b(stage: int, pp: int, num_microbatches: int, vpp: int) -> tuple[Action, ...]:
    """Returns the compute actions of `stage`; num_microbatches must be a multiple of pp."""
    total = num_microbatches * vpp
    warmup = min(total, 2 * (pp - stage - 1) + (vpp - 1) * pp)

    def slot(step: int, backward: bool) -> tuple[int, int]:
        group, within = divmod(step, pp * vpp)
        local_chunk, offset = divmod(within, pp)
        if backward:
            local_chunk = vpp - 1 - local_chunk
        return local_chunk * pp + stage, group * pp + offset

    out = [Action(ActionKind.FORWARD, *slot(i, False)) for i in range(warmup)]
    for i in range(warmup, total):
        out.append(Action(ActionKind.FORWARD, *slot(i, False)))
        out.append(Action(ActionKind.BACKWARD, *slot(i - warmup, True)))
    out.extend(Action(ActionKind.BACKWARD, *slot(i, True)) for i in range(total - warmup, total))
    return tuple(out)
