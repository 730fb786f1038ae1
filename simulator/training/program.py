"""A lowered step as a program: every action with the one it waits for, in an order that works."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from flopwright.plan.lower import lower
from flopwright.plan.parallel import ParallelPlan, ScheduleName
from flopwright.plan.schedules.actions import Action, ActionKind

_RECV_OF = {
    ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
}
_SENDS = frozenset(_RECV_OF.values())


@dataclass(frozen=True, slots=True)
class Entry:
    """One action of the program.

    Attributes:
        stage: whose list it stands in.
        waits_for: index in the program of the send that a receive waits for, -1 without one.
    """

    stage: int
    action: Action
    waits_for: int


@dataclass(frozen=True, slots=True)
class Program:
    """All stages' lowered lists as one list in which every entry comes after what it waits for.

    The order inside a stage is that of its list. Optimizer steps wait for every stage's
    reduction: the gradient norm is summed over all ranks.
    """

    num_stages: int
    entries: tuple[Entry, ...]


def program_of(plan: ParallelPlan, num_microbatches: int) -> Program:
    """Returns the program of a plan's step; equal pipelines share one."""
    return _program(plan.schedule, plan.pp, plan.vpp, num_microbatches, plan.dp * plan.cp > 1)


@lru_cache(maxsize=64)
def _program(
    schedule: ScheduleName, pp: int, vpp: int, num_microbatches: int, reduces: bool
) -> Program:
    plan = ParallelPlan(schedule=schedule, pp=pp, vpp=vpp, dp_shard=2 if reduces else 1)
    return merge(lower(plan, num_microbatches))


def merge(lists: tuple[tuple[Action, ...], ...]) -> Program:
    """Returns the lists as a program.

    Raises:
        ValueError: the lists wait for each other in a circle, or for a send that none has.
    """
    position = [0] * len(lists)
    sent: dict[tuple[ActionKind, int, int], int] = {}
    out: list[Entry] = []
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            while position[stage] < len(actions):
                entry = _entry(stage, actions[position[stage]], sent)
                if entry is None:
                    break
                if entry.action.kind in _SENDS:
                    sent[entry.action.kind, *_travel(entry.action)] = len(out)
                out.append(entry)
                position[stage] += 1
                moved = True
    if any(p < len(a) for p, a in zip(position, lists, strict=True)):
        stuck = [str(a[p]) for p, a in zip(position, lists, strict=True) if p < len(a)]
        raise ValueError(f"the lists of actions wait for each other: {', '.join(stuck)}")
    return Program(len(lists), tuple(out))


def _travel(action: Action) -> tuple[int, int]:
    """Returns (chunk the data is for, micro-batch): the same for a send and its receive."""
    step = {ActionKind.SEND_FORWARD: 1, ActionKind.SEND_BACKWARD: -1}.get(action.kind, 0)
    return action.chunk + step, action.microbatch


def _entry(
    stage: int, action: Action, sent: dict[tuple[ActionKind, int, int], int]
) -> Entry | None:
    """Returns the entry, or None while what it waits for has not been sent."""
    if action.kind not in _RECV_OF:
        return Entry(stage, action, -1)
    source = sent.get((_RECV_OF[action.kind], *_travel(action)))
    return None if source is None else Entry(stage, action, source)
