"""ZB-H1 (arXiv 2401.10241, 2.1): 1F1B whose weight gradients fill the bubble.

Only the input gradient is on the way to the stage before, so the backward is cut in two:
stage s puts off its weight gradients by s backwards and works them off where 1F1B would
wait. Every stage then holds as many micro-batches as 1F1B's first. The bubble is
(pp - 1) (F + I - W), a third of 1F1B's for equal F, I and W.

With vpp > 1 the chunks are interleaved; num_microbatches must then be a multiple of pp.
"""

from __future__ import annotations

from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.interleaved_1f1b import slot


def zb_h1(stage: int, pp: int, num_microbatches: int, vpp: int = 1) -> tuple[Action, ...]:
    """Returns the compute actions of `stage`; at most pp * vpp forwards await their end."""
    total = num_microbatches * vpp
    warmup = min(total, pp - stage - 1 + (vpp - 1) * pp)

    def action(kind: ActionKind, step: int) -> Action:
        return Action(kind, *slot(kind, step, stage, pp, vpp))

    out = [action(ActionKind.FORWARD, i) for i in range(warmup)]
    for i in range(total):
        if warmup + i < total:
            out.append(action(ActionKind.FORWARD, warmup + i))
        out.append(action(ActionKind.BACKWARD_INPUT, i))
        if i >= stage:
            out.append(action(ActionKind.BACKWARD_WEIGHT, i - stage))
    left = range(max(0, total - stage), total)
    out.extend(action(ActionKind.BACKWARD_WEIGHT, i) for i in left)
    return tuple(out)
