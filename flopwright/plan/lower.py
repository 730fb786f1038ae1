"""Compute actions become the full list a rank runs: sends, receives, reduction, step.

The simulator times this list and the executor runs it: there is no other description of
a step.
"""

from __future__ import annotations

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.registry import compute_actions


def lower(plan: ParallelPlan, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns each stage's lowered list for one optimizer step.

    A chunk that is not the first receives its input before its forward; one that is not
    the last sends its output after it; gradients travel the other way. Neighbouring chunks
    on the same stage (pp = 1) hand over in place. The step ends with the gradient
    reduction over data-parallel ranks and the optimizer.
    """
    last = plan.num_chunks - 1
    lists = []
    for stage, actions in enumerate(compute_actions(plan, num_microbatches)):
        out: list[Action] = []
        for action in actions:
            forward = action.kind is ActionKind.FORWARD
            source = action.chunk - 1 if forward else action.chunk + 1
            target = action.chunk + 1 if forward else action.chunk - 1
            recv, send = (
                (ActionKind.RECV_FORWARD, ActionKind.SEND_FORWARD)
                if forward
                else (ActionKind.RECV_BACKWARD, ActionKind.SEND_BACKWARD)
            )
            if 0 <= source <= last and source % plan.pp != stage:
                out.append(Action(recv, action.chunk, action.microbatch, source % plan.pp))
            out.append(action)
            if 0 <= target <= last and target % plan.pp != stage:
                out.append(Action(send, action.chunk, action.microbatch, target % plan.pp))
        if plan.dp * plan.cp > 1:
            out.append(Action(ActionKind.REDUCE_GRADIENTS))
        out.append(Action(ActionKind.OPTIMIZER_STEP))
        lists.append(tuple(out))
    return tuple(lists)
