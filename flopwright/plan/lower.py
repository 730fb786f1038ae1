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
from typing import Final, Literal

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import chunks_of_stage, stage_of_chunk
from flopwright.plan.schedules.registry import compute_actions

Lists = tuple[tuple[Action, ...], ...]
Unit = tuple[Action, ...]  # one compute action, or two that overlap

_Often = Literal["action", "step", "never"]
_FORWARD: Final = ActionKind.FORWARD
# By (forward, receive).
_TRANSFER: Final = {
    (True, True): ActionKind.RECV_FORWARD,
    (True, False): ActionKind.SEND_FORWARD,
    (False, True): ActionKind.RECV_BACKWARD,
    (False, False): ActionKind.SEND_BACKWARD,
}


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
    half: Action | None = None
    for action in actions:
        if not action.overlaps:
            yield (action,)
        elif half is None:
            half = action
        else:
            yield (half, action)
            half = None
    assert half is None, "half of a pair has no other half"


@dataclass(slots=True)
class _Stage:
    """One stage's list in the making.

    Attributes:
        peers: by chunk, the stages of the chunk before and of the one after it; -1 for none
            and for this stage itself: neighbouring chunks on one stage hand over in place.
        gathers, reduces: how often weights are gathered and gradients reduced by chunk.
    """

    plan: ParallelPlan
    stage: int
    units: tuple[Unit, ...]
    buckets: Sequence[int]
    peers: dict[int, tuple[int, int]] = field(init=False)
    gathers: _Often = field(init=False)
    reduces: _Often = field(init=False)
    _leaves: set[tuple[int, int]] = field(default_factory=set)
    _left: Counter[int] = field(default_factory=Counter)  # backwards to come, by chunk
    _gathered: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        plan, last = self.plan, self.plan.num_chunks - 1

        def peer(chunk: int) -> int:
            stage = stage_of_chunk(plan, chunk) if 0 <= chunk <= last else -1
            return -1 if stage == self.stage else stage

        mine = chunks_of_stage(plan, self.stage)
        self.peers = {c: (peer(c - 1), peer(c + 1)) for c in mine}
        fsdp2 = plan.data_parallel == "fsdp2"
        kept: _Often = "step" if fsdp2 and plan.zero_stage in {1, 2} else "never"
        self.gathers = "action" if plan.zero_stage == 3 else kept
        often: _Often = "action" if plan.zero_stage >= 2 else "step" if fsdp2 else "never"
        self.reduces = often if reduces_gradients(plan) else "never"
        if self.reduces == "step":
            self._left.update(a.chunk for u in self.units for a in u if _ends_backward(a))

    def actions(self) -> Iterator[Action]:
        """Yields the whole list."""
        fetches = self._fetches() if self.plan.activation_offload else {}
        again = self.plan.recompute != "none"
        for i, unit in enumerate(self.units):
            if self.gathers != "never":
                for action in unit:
                    yield from self._gather(action)
            yield from self._transfers(unit, receive=True)
            yield from fetches.get(i, ())
            if again:
                for action in unit:
                    if _begins_backward(action):
                        yield Action(ActionKind.RECOMPUTE, action.chunk, action.microbatch)
            yield from unit
            yield from self._transfers(unit, receive=False)
            if self._leaves:
                for action in unit:
                    if action.kind is _FORWARD and action[1:3] in self._leaves:
                        yield Action(ActionKind.OFFLOAD, action.chunk, action.microbatch)
            if self.reduces != "never":
                for action in unit:
                    if _ends_backward(action):
                        yield from self._reduce(action)
        if reduces_gradients(self.plan) and self.reduces == "never":
            yield Action(ActionKind.REDUCE_GRADIENTS)
        yield Action(ActionKind.OPTIMIZER_STEP)

    def _fetches(self) -> dict[int, list[Action]]:
        """Returns the fetches to start before each unit, and remembers what leaves."""
        ran: dict[tuple[int, int], int] = {}
        out: dict[int, list[Action]] = {}
        for i, unit in enumerate(self.units):
            for action in unit:
                key = (action.chunk, action.microbatch)
                if action.kind is _FORWARD:
                    ran[key] = i
                elif _begins_backward(action) and i - ran[key] > 2:
                    self._leaves.add(key)
                    out.setdefault(i - 1, []).append(Action(ActionKind.FETCH, *key))
        return out

    def _gather(self, action: Action) -> Iterator[Action]:
        chunk, parts = action.chunk, self._parts(action.chunk)
        forward = action.kind is _FORWARD
        if self.gathers == "action":
            order = parts if forward else parts[::-1]
            if forward or _begins_backward(action):
                for part in order:
                    yield Action(ActionKind.GATHER_WEIGHTS, *action[1:3], bucket=part)
        elif forward and chunk not in self._gathered:
            self._gathered.add(chunk)
            for part in parts:
                yield Action(ActionKind.GATHER_WEIGHTS, chunk, bucket=part)

    def _reduce(self, action: Action) -> Iterator[Action]:
        chunk = action.chunk
        self._left[chunk] -= 1
        if self.reduces == "action" or self._left[chunk] == 0:
            microbatch = action.microbatch if self.reduces == "action" else -1
            for part in reversed(self._parts(chunk)):
                yield Action(ActionKind.REDUCE_GRADIENTS, chunk, microbatch, bucket=part)

    def _parts(self, chunk: int) -> range:
        """Returns the buckets of a chunk, -1 for the whole."""
        return range(self.buckets[chunk]) if self.buckets else range(-1, 0)

    def _transfers(self, unit: Unit, *, receive: bool) -> Iterator[Action]:
        """Yields what the actions of a unit receive, or send; weight gradients stay."""
        for kind, chunk, microbatch, *_ in unit:
            if kind is ActionKind.BACKWARD_WEIGHT:
                continue
            forward = kind is _FORWARD
            peer = self.peers[chunk][receive != forward]
            if peer >= 0:
                yield Action(_TRANSFER[forward, receive], chunk, microbatch, peer)


def _begins_backward(action: Action) -> bool:
    kind = action.kind
    return kind is ActionKind.BACKWARD or kind is ActionKind.BACKWARD_INPUT


def _ends_backward(action: Action) -> bool:
    kind = action.kind
    return kind is ActionKind.BACKWARD or kind is ActionKind.BACKWARD_WEIGHT
