"""Compute actions become the full list a rank runs: transfers, moves of memory, reduction, step.

The simulator times this list and the executor runs it: there is no other description of
a step. Compute, receives and the actions of the step's end hold the rank up; the others are
only started where they stand and run beside the compute, those of one kind in order:

    sends        what the neighbour waits for
    OFFLOAD      after its forward; FETCH one compute action before the backward that needs
                 it. What would come back at once stays
    GATHER       before the actions that need the weights: each forward and each backward
                 under ZeRO-3, the step's first forward of a chunk under FSDP2's stages 1 and
                 2. DeepSpeed's stages 1 and 2 gather inside the optimizer step
    REDUCE       of a chunk, where gradients are sharded (ZeRO-2 and 3: after every
                 micro-batch) or FSDP2 reduces as chunks get done (after their last backward).
                 Otherwise the whole stage's gradients are reduced at the step's end

RECOMPUTE stands directly before the backward (or the pair of a forward and a backward) that
it belongs to. The weight gradient of a split backward ends what its forward began.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.plan.schedules.registry import compute_actions

Lists = tuple[tuple[Action, ...], ...]
Unit = tuple[Action, ...]  # one compute action, or two that overlap

_BEGINS_BACKWARD = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT})
_ENDS_BACKWARD = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT})


def lower(plan: ParallelPlan, num_microbatches: int, buckets: Sequence[int] = ()) -> Lists:
    """Returns each stage's lowered list for one optimizer step.

    Args:
        buckets: in how many parts each chunk's weights are gathered and its gradients
            reduced; without it each is moved as a whole.
    """
    return tuple(
        tuple(_Stage(plan, stage, tuple(units(actions)), buckets).actions())
        for stage, actions in enumerate(compute_actions(plan, num_microbatches))
    )


def reduces_gradients(plan: ParallelPlan) -> bool:
    """Returns whether ranks hold equal weights of which each has only a part of the gradient.

    Data- and context-parallel ranks do, and so do tensor-parallel ones: under sequence
    parallelism each sees other tokens at the norms, and experts that fewer than tp ranks
    share out among themselves stand on several.
    """
    dense = plan.dp * plan.cp * (plan.tp if plan.sequence_parallel else 1)
    experts = plan.dp * plan.cp * plan.tp // (plan.ep * plan.etp)
    return max(dense, experts) > 1


def units(actions: Sequence[Action]) -> Iterator[Unit]:
    """Yields a stage's compute actions one by one, those that overlap as pairs."""
    half: Unit = ()
    for action in actions:
        half = (*half, action)
        if action.overlaps and len(half) == 1:
            continue
        yield half
        half = ()
    assert not half, "half of a pair has no other half"


@dataclass(slots=True)
class _Stage:
    """One stage's list in the making."""

    plan: ParallelPlan
    stage: int
    units: tuple[Unit, ...]
    buckets: Sequence[int]
    _leaves: set[tuple[int, int]] = field(default_factory=set)
    _left: Counter[int] = field(default_factory=Counter)  # backwards to come, by chunk
    _gathered: set[int] = field(default_factory=set)

    def actions(self) -> Iterator[Action]:
        """Yields the whole list."""
        fetches = self._fetches() if self.plan.activation_offload else {}
        self._left.update(a.chunk for u in self.units for a in u if a.kind in _ENDS_BACKWARD)
        for i, unit in enumerate(self.units):
            for action in unit:
                yield from self._gathers(action)
            for action in unit:
                yield from self._receive(action)
            yield from fetches.get(i, ())
            for action in unit:
                if self.plan.recompute != "none" and action.kind in _BEGINS_BACKWARD:
                    yield Action(ActionKind.RECOMPUTE, action.chunk, action.microbatch)
            yield from unit
            for action in unit:
                yield from self._after(action)
        if reduces_gradients(self.plan) and not self._reduces_by_chunk():
            yield Action(ActionKind.REDUCE_GRADIENTS)
        yield Action(ActionKind.OPTIMIZER_STEP)

    def _fetches(self) -> dict[int, list[Action]]:
        """Returns the fetches to start before each unit, and remembers what leaves."""
        ran: dict[tuple[int, int], int] = {}
        out: dict[int, list[Action]] = {}
        for i, unit in enumerate(self.units):
            for action in unit:
                key = (action.chunk, action.microbatch)
                if action.kind is ActionKind.FORWARD:
                    ran[key] = i
                elif action.kind in _BEGINS_BACKWARD and i - ran[key] > 2:
                    self._leaves.add(key)
                    out.setdefault(i - 1, []).append(Action(ActionKind.FETCH, *key))
        return out

    def _after(self, action: Action) -> Iterator[Action]:
        """Yields what starts once a compute action is done."""
        yield from self._send(action)
        key = (action.chunk, action.microbatch)
        if action.kind is ActionKind.FORWARD and key in self._leaves:
            yield Action(ActionKind.OFFLOAD, *key)
        if action.kind in _ENDS_BACKWARD and self._reduces_by_chunk():
            self._left[action.chunk] -= 1
            sharded = self.plan.zero_stage >= 2
            if sharded or not self._left[action.chunk]:
                whole = action.microbatch if sharded else -1
                parts = reversed(self._parts(action.chunk))
                yield from self._moves(ActionKind.REDUCE_GRADIENTS, action.chunk, whole, parts)

    def _gathers(self, action: Action) -> Iterator[Action]:
        kind, chunk = action.kind, action.chunk
        parts = self._parts(chunk)
        forward = kind is ActionKind.FORWARD
        if self.plan.zero_stage == 3 and (forward or kind in _BEGINS_BACKWARD):
            order = parts if forward else parts[::-1]
            yield from self._moves(ActionKind.GATHER_WEIGHTS, chunk, action.microbatch, order)
        elif self._gathers_once() and forward and chunk not in self._gathered:
            self._gathered.add(chunk)
            yield from self._moves(ActionKind.GATHER_WEIGHTS, chunk, -1, parts)

    def _gathers_once(self) -> bool:
        return self.plan.data_parallel == "fsdp2" and self.plan.zero_stage in {1, 2}

    def _reduces_by_chunk(self) -> bool:
        by_chunk = self.plan.zero_stage >= 2 or self.plan.data_parallel == "fsdp2"
        return by_chunk and reduces_gradients(self.plan)

    def _parts(self, chunk: int) -> range:
        """Returns the buckets of a chunk, -1 for the whole."""
        return range(self.buckets[chunk]) if self.buckets else range(-1, 0)

    @staticmethod
    def _moves(
        kind: ActionKind, chunk: int, microbatch: int, parts: Iterator[int] | range
    ) -> Iterator[Action]:
        for part in parts:
            yield Action(kind, chunk, microbatch, bucket=part)

    def _receive(self, action: Action) -> Iterator[Action]:
        if action.kind is ActionKind.FORWARD:
            yield from self._transfer(ActionKind.RECV_FORWARD, action, action.chunk - 1)
        elif action.kind in _BEGINS_BACKWARD:
            yield from self._transfer(ActionKind.RECV_BACKWARD, action, action.chunk + 1)

    def _send(self, action: Action) -> Iterator[Action]:
        if action.kind is ActionKind.FORWARD:
            yield from self._transfer(ActionKind.SEND_FORWARD, action, action.chunk + 1)
        elif action.kind in _BEGINS_BACKWARD:
            yield from self._transfer(ActionKind.SEND_BACKWARD, action, action.chunk - 1)

    def _transfer(self, kind: ActionKind, action: Action, other: int) -> Iterator[Action]:
        """Yields the transfer to or from chunk `other`.

        Neighbouring chunks on the same stage hand over in place.
        """
        if 0 <= other < self.plan.num_chunks:
            peer = stage_of_chunk(self.plan, other)
            if peer != self.stage:
                yield Action(kind, action.chunk, action.microbatch, peer)
