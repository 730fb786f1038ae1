"""Compute actions become the full list a rank runs: sends, receives, reduction, step.

The simulator times this list and the executor runs it: there is no other description of
a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.plan.schedules.registry import compute_actions


def lower(plan: ParallelPlan, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns each stage's lowered list for one optimizer step.

    A chunk that is not the first receives its input before its forward; one that is not
    the last sends its output after it; gradients travel the other way. Neighbouring chunks
    on the same stage hand over in place. The step ends with the gradient reduction over
    data-parallel ranks and the optimizer.
    """
    return tuple(
        (*_with_transfers(plan, stage, actions), *_step_end(plan))
        for stage, actions in enumerate(compute_actions(plan, num_microbatches))
    )


def _with_transfers(plan: ParallelPlan, stage: int, actions: Iterable[Action]) -> Iterator[Action]:
    """Yields a stage's compute actions with their receives and sends.

    Two actions that overlap receive before the first and send after the second.
    """
    waiting: list[Action] = []
    for action in actions:
        waiting.append(action)
        if action.overlaps and len(waiting) == 1:
            continue
        for a in waiting:
            yield from _receive(plan, stage, a)
        yield from waiting
        for a in waiting:
            yield from _send(plan, stage, a)
        waiting.clear()


def _receive(plan: ParallelPlan, stage: int, action: Action) -> Iterator[Action]:
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return
    forward = action.kind is ActionKind.FORWARD
    kind = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
    yield from _transfer(plan, stage, kind, action, action.chunk + (-1 if forward else 1))


def _send(plan: ParallelPlan, stage: int, action: Action) -> Iterator[Action]:
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return
    forward = action.kind is ActionKind.FORWARD
    kind = ActionKind.SEND_FORWARD if forward else ActionKind.SEND_BACKWARD
    yield from _transfer(plan, stage, kind, action, action.chunk + (1 if forward else -1))


def _transfer(
    plan: ParallelPlan, stage: int, kind: ActionKind, action: Action, other: int
) -> Iterator[Action]:
    """Yields the transfer to or from chunk `other`, if that stands on another stage."""
    if not 0 <= other < plan.num_chunks:
        return
    peer = stage_of_chunk(plan, other)
    if peer != stage:
        yield Action(kind, action.chunk, action.microbatch, peer)


def _step_end(plan: ParallelPlan) -> Iterator[Action]:
    if plan.dp * plan.cp > 1:
        yield Action(ActionKind.REDUCE_GRADIENTS)
    yield Action(ActionKind.OPTIMIZER_STEP)
