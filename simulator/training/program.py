"""A lowered step as a program: every action with the one it waits for, in an order that works."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Final

from flopwright.plan.lower import lower, reduces_gradients
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.simulator.training.codes import NUM_CHUNK_FAMILIES as NUM_CHUNK_FAMILIES
from flopwright.simulator.training.codes import Code as Code
from flopwright.simulator.training.codes import Entry as Entry
from flopwright.simulator.training.codes import Family as Family
from flopwright.simulator.training.codes import Lane as Lane
from flopwright.simulator.training.codes import Op as Op
from flopwright.simulator.training.codes import Program as Program

Lists = tuple[tuple[Action, ...], ...]

_RECV_OF: Final = {
    ActionKind.RECV_FORWARD: ActionKind.SEND_FORWARD,
    ActionKind.RECV_BACKWARD: ActionKind.SEND_BACKWARD,
}
# By kind of a transfer: its send's kind, and how far from its chunk the one it is for stands.
_TRAVEL: Final = {
    ActionKind.SEND_FORWARD: (ActionKind.SEND_FORWARD, 1),
    ActionKind.SEND_BACKWARD: (ActionKind.SEND_BACKWARD, -1),
    **{receive: (send, 0) for receive, send in _RECV_OF.items()},
}
# Actions that a stage starts and that something else carries out.
_LANES: Final = {
    ActionKind.OFFLOAD: "out",
    ActionKind.FETCH: "in",
    ActionKind.GATHER_WEIGHTS: "dp",
    ActionKind.REDUCE_GRADIENTS: "dp",
}
_FAMILY: Final = {
    ActionKind.FORWARD: Family.FORWARD,
    ActionKind.BACKWARD: Family.BACKWARD,
    ActionKind.BACKWARD_INPUT: Family.INPUT,
    ActionKind.BACKWARD_WEIGHT: Family.WEIGHT,
    ActionKind.RECOMPUTE: Family.RECOMPUTE,
    ActionKind.OFFLOAD: Family.OFFLOAD,
    ActionKind.FETCH: Family.FETCH,
    ActionKind.GATHER_WEIGHTS: Family.GATHER,
    ActionKind.REDUCE_GRADIENTS: Family.REDUCE,
    ActionKind.OPTIMIZER_STEP: Family.STEP,
}
# The rest of a backward before which its recompute stands as an action.
_REST: Final = {
    Family.BACKWARD: Family.BACKWARD_REST,
    Family.INPUT: Family.INPUT_REST,
}
_COMPUTE: Final = int(Op.COMPUTE)
_LANE: Final = int(Op.LANE)
_RECEIVE: Final = int(Op.RECEIVE)
_SEND_ROWS: Final = int(Family.SEND)
_NEW: Final = tuple.__new__  # a NamedTuple's own constructor takes twice as long


def program_of(plan: ParallelPlan, num_microbatches: int) -> Program:
    """Returns the program of a plan's step; plans whose lists are equal share one."""
    return _program(
        ParallelPlan(
            schedule=plan.schedule,
            pp=plan.pp,
            vpp=plan.vpp,
            dp_shard=2 if reduces_gradients(plan) else 1,
            zero_stage=plan.zero_stage,
            data_parallel=plan.data_parallel,
            recompute="none" if plan.recompute == "none" else "full",
            activation_offload=plan.activation_offload,
        ),
        num_microbatches,
    )


@lru_cache(maxsize=64)
def _program(plan: ParallelPlan, num_microbatches: int) -> Program:
    with _without_collector():
        return merge(lower(plan, num_microbatches))


def merge(lists: Lists) -> Program:
    """Returns the lists as a program.

    Raises:
        ValueError: the lists wait for each other in a circle, or for a send that none has.
    """
    position = [0] * len(lists)
    builder = _Builder(len(lists), 1 + max((a.chunk for x in lists for a in x), default=0))
    moved = True
    while moved:
        moved = False
        for stage, actions in enumerate(lists):
            before = position[stage]
            position[stage] = builder.add_from(stage, actions, before)
            moved = moved or position[stage] > before
    if any(p < len(a) for p, a in zip(position, lists, strict=True)):
        stuck = [str(a[p]) for p, a in zip(position, lists, strict=True) if p < len(a)]
        raise ValueError(f"the lists of actions wait for each other: {', '.join(stuck)}")
    return builder.program()


@contextmanager
def _without_collector() -> Iterator[None]:
    """Keeps Python from looking for garbage among hundreds of thousands of fresh tuples."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_Key = tuple[ActionKind, int, int]
# Compute that waits for nothing but its stage, unless there are copies, gathers or recomputes.
_PLAIN: Final = {
    ActionKind.FORWARD: Family.FORWARD.value,
    ActionKind.BACKWARD: Family.BACKWARD.value,
    ActionKind.BACKWARD_INPUT: Family.INPUT.value,
    ActionKind.BACKWARD_WEIGHT: Family.WEIGHT.value,
}


class _Builder:
    """Adds entries one by one and finds what each waits for."""

    def __init__(self, num_stages: int, num_chunks: int) -> None:
        self._stages, self._chunks = num_stages, num_chunks
        self._actions: list[Action] = []
        self._codes: list[Code] = []
        self._lanes: dict[Lane, int] = {}
        self._sends: dict[tuple[int, int], int] = {}  # lanes by stage and peer
        self._pairs: dict[tuple[int, int], int] = {}
        self._open = [-1] * num_stages  # the first half of a pair
        self._done: dict[_Key, int] = {}
        self._special = False  # whether compute may have to wait for more than its stage
        self._gathered: dict[int, tuple[int, ...]] = {}
        self._reduced: list[tuple[int, ...]] = [()] * num_stages
        self._left: list[tuple[int, ...]] = [()] * num_stages  # a stage's last two OFFLOADs

    def add_from(self, stage: int, actions: tuple[Action, ...], place: int) -> int:
        """Adds a stage's actions from `place` on; returns where one waits that is to come."""
        done, codes, added = self._done, self._codes, self._actions
        for action in actions[place:] if place else actions:
            kind, chunk, microbatch = action[:3]
            plain = _PLAIN.get(kind)
            if plain is not None and not action[5] and not self._special:
                row = plain * self._chunks + chunk
                codes.append(_NEW(Code, (_COMPUTE, stage, place, -1, row, (), -1)))
            elif (send := _RECV_OF.get(kind)) is not None:
                came = done.get((send, chunk + _TRAVEL[kind][1], microbatch))
                if came is None:
                    return place
                codes.append(_NEW(Code, (_RECEIVE, stage, place, -1, -1, (came,), -1)))
            elif kind in _TRAVEL:
                self._send(stage, action, place)
            else:
                self._add(stage, action, place)
            added.append(action)
            place += 1
        return place

    def _send(self, stage: int, action: Action, place: int) -> None:
        """Adds a send. A gradient travels back over the hop of its forward."""
        kind, chunk, microbatch, peer = action[:4]
        self._done[kind, chunk + _TRAVEL[kind][1], microbatch] = len(self._codes)
        lane = self._sends.get((stage, peer), -1)
        if lane < 0:
            lane = self._lanes.setdefault(Lane("send", stage, peer), len(self._lanes))
            self._sends[stage, peer] = lane
        row = _SEND_ROWS * self._chunks + chunk - (kind is ActionKind.SEND_BACKWARD)
        self._codes.append(_NEW(Code, (_LANE, stage, place, lane, row, (), -1)))

    def _add(self, stage: int, action: Action, place: int) -> None:
        """Adds what is no transfer and may wait for more than its stage."""
        index = len(self._codes)
        op, lane = self._op(stage, action)
        row = self._row(stage, action)
        waits, partner = self._waits(stage, action), -1
        if op is Op.FIRST:
            self._open[stage] = index
        elif op is Op.SECOND:
            partner, self._open[stage] = self._open[stage], -1
            first = self._codes[partner].row
            row = self._pairs.setdefault((first, row), self._first_pair() + len(self._pairs))
        self._remember(index, stage, action)
        self._codes.append(_NEW(Code, (int(op), stage, place, lane, row, waits, partner)))

    def program(self) -> Program:
        """Returns what was added."""
        assert all(i < 0 for i in self._open), "half of a pair has no other half"
        return Program(
            self._stages,
            self._chunks,
            tuple(self._actions),
            tuple(self._codes),
            tuple(self._lanes),
            tuple(self._pairs),
            tuple(max(1, n) for n in self._reductions()),
        )

    def _reductions(self) -> list[int]:
        out = [0] * self._stages
        for code, action in zip(self._codes, self._actions, strict=True):
            out[code.stage] += action.kind is ActionKind.REDUCE_GRADIENTS
        return out

    def _first_pair(self) -> int:
        return NUM_CHUNK_FAMILIES * self._chunks + 2 * self._stages

    def _op(self, stage: int, action: Action) -> tuple[Op, int]:
        kind = action.kind
        if kind is ActionKind.OPTIMIZER_STEP:
            return Op.STEP, -1
        if kind is ActionKind.REDUCE_GRADIENTS and action.chunk < 0:
            return Op.REDUCE, -1
        name = _LANES.get(kind)
        if name is not None:
            return Op.LANE, self._lanes.setdefault(Lane(name, stage), len(self._lanes))
        if not action.overlaps:
            return Op.COMPUTE, -1
        return (Op.FIRST if self._open[stage] < 0 else Op.SECOND), -1

    def _row(self, stage: int, action: Action) -> int:
        """Returns the row of the table of durations."""
        family, chunk = _FAMILY[action.kind], action.chunk
        if family >= NUM_CHUNK_FAMILIES:
            extra = (family - NUM_CHUNK_FAMILIES) * self._stages + stage
            return NUM_CHUNK_FAMILIES * self._chunks + extra
        again = (ActionKind.RECOMPUTE, action.chunk, action.microbatch)
        if family in _REST and again in self._done:
            family = _REST[family]
        return family * self._chunks + chunk

    def _waits(self, stage: int, action: Action) -> tuple[int, ...]:
        """Returns what an action waits for beside its stage.

        What is copied has two places on the GPU: a forward fills one while the one before it
        leaves, and so waits for the one before that; a fetch waits until all that were to
        leave have gone, its own among them (a stage's copies go one after the other).
        """
        kind, chunk, microbatch = action.kind, action.chunk, action.microbatch
        if kind is ActionKind.OPTIMIZER_STEP:
            return self._reduced[stage]
        if kind is ActionKind.FETCH:
            return self._left[stage][-1:]
        if _LANES.get(kind) is not None or chunk < 0:
            return ()
        waits: tuple[int, ...] = ()
        if self._gathered:
            waits = self._gathered.pop(chunk, ())  # a stage that waited once has the weights
        if kind is ActionKind.FORWARD:
            return (*waits, *self._left[stage][:-1])
        fetched = self._done.pop((ActionKind.FETCH, chunk, microbatch), -1)
        return waits if fetched < 0 else (*waits, fetched)

    def _remember(self, index: int, stage: int, action: Action) -> None:
        kind, chunk = action.kind, action.chunk
        if kind in {ActionKind.OFFLOAD, ActionKind.FETCH, ActionKind.RECOMPUTE}:
            self._done[kind, chunk, action.microbatch] = index
            self._special = True
            if kind is ActionKind.OFFLOAD:
                self._left[stage] = (*self._left[stage][-1:], index)
        elif kind is ActionKind.GATHER_WEIGHTS:
            self._special = True
            self._gathered[chunk] = (*self._gathered.get(chunk, ()), index)
        elif kind is ActionKind.REDUCE_GRADIENTS and chunk >= 0:
            self._reduced[stage] = (*self._reduced[stage], index)
