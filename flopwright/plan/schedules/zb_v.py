"""ZB-V (arXiv 2401.10241, 6): two chunks a stage in a V, weight gradients fill the bubble.

Stage s holds chunks s and 2 pp - 1 - s: the loss is on stage 0, whose backward can begin
at once. With equal times of forward, input gradient and weight gradient, stages work from
their first forward to their last weight gradient without a gap, and hold no more than 1F1B.
"""

from __future__ import annotations

from collections import Counter
from itertools import repeat

from flopwright.plan.schedules.actions import Action, ActionKind

_F, _I, _W = ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT


def zb_v(stage: int, pp: int, num_microbatches: int) -> tuple[Action, ...]:
    """Returns the compute actions of `stage`; at most 2 pp forwards await their end.

    The list is made for at least 2 pp - 1 micro-batches; those beyond num_microbatches are
    struck out.
    """
    down, up = stage, 2 * pp - 1 - stage
    filled = max(num_microbatches, 2 * pp - 1)
    out: list[Action] = []
    count: Counter[tuple[ActionKind, int]] = Counter()

    def run(*steps: tuple[ActionKind, int]) -> None:
        for kind, chunk in steps:
            out.append(Action(kind, chunk, count[kind, chunk]))
            count[kind, chunk] += 1

    for _ in repeat(None, 2 * (pp - stage) - 1):
        run((_F, down))
    for _ in repeat(None, stage):
        run((_F, up), (_F, down))
    for _ in repeat(None, pp - stage):
        run((_F, up), (_I, up), (_W, up))
    while count[_F, up] < filled:
        if count[_F, down] < filled:
            run((_F, down))
        run((_I, down), (_W, down), (_F, up), (_I, up), (_W, up))
    for _ in repeat(None, stage):
        run((_I, down), (_I, up))
    for _ in repeat(None, pp - stage):
        run((_I, down), (_W, down))
    for chunk in (up, down):
        while count[_W, chunk] < count[_I, chunk]:
            run((_W, chunk))
    return tuple(a for a in out if a.microbatch < num_microbatches)
