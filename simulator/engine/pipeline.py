"""One training step on the event engine: the reference that the replay must equal.

Stages are processes that go through their lowered lists; links are resources. With private
links (one a direction between two stages) the times are those of training/replay.py; links
can also be shared, and then transfers queue.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import simpy

from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.simulator.engine.engine import Engine, Process
from flopwright.simulator.training.replay import Durations

LinkName = Callable[[int, int], str]
Record = tuple[int, Action, float, float]

_MATCH = {
    ActionKind.RECV_FORWARD: (ActionKind.SEND_FORWARD, -1),
    ActionKind.RECV_BACKWARD: (ActionKind.SEND_BACKWARD, 1),
}


def private_link(source: int, target: int) -> str:
    """Returns the name of a link that only this pair uses, in this direction."""
    return f"{source}->{target}"


@dataclass(frozen=True, slots=True)
class StepRun:
    """What happened: (stage, action, start, end) in order of ends, and the step's seconds.

    A send's times are those of its transfer.
    """

    records: tuple[Record, ...]
    step_time_s: float


def run_step(
    lists: tuple[tuple[Action, ...], ...],
    durations: Durations,
    link_name: LinkName = private_link,
    link_capacity: int = 1,
) -> StepRun:
    """Returns one step of the lowered lists in simulated time.

    Args:
        durations: plain numbers (no trailing axis).
        link_name: which link a transfer takes; equal names share one.
        link_capacity: transfers a link carries at once, each at its own full speed.
    """
    step = _Step(Engine(), lists, durations, link_name, link_capacity)
    for stage in range(len(lists)):
        step.engine.start(step.stage(stage))
    step.engine.run()
    return StepRun(tuple(step.records), step.engine.now_s)


@dataclass(slots=True)
class _Step:
    engine: Engine
    lists: tuple[tuple[Action, ...], ...]
    durations: Durations
    link_name: LinkName
    link_capacity: int
    records: list[Record] = field(default_factory=list)
    _links: dict[str, simpy.Resource] = field(default_factory=dict)
    _arrived: dict[tuple[ActionKind, int, int], simpy.Event] = field(default_factory=dict)
    _reduced: list[simpy.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reduced.extend(self.engine.event() for _ in self.lists)

    def stage(self, stage: int) -> Process:
        """Goes through the stage's list."""
        for action in self.lists[stage]:
            start_s = self.engine.now_s
            if action.kind in {ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD}:
                self.engine.start(self._transfer(stage, action))
                continue
            if action.kind in _MATCH:
                kind, shift = _MATCH[action.kind]
                yield self._arrival(kind, action.chunk + shift, action.microbatch)
            elif action.kind is ActionKind.OPTIMIZER_STEP:
                self._reduced[stage].succeed()
                yield self.engine.all_of(self._reduced)
                yield self.engine.wait(float(np.asarray(self.durations.norm_s)))
                start_s = self.engine.now_s
                yield self.engine.wait(float(self.durations.step_s[stage]))
            else:
                yield self.engine.wait(self._seconds(stage, action))
            self.records.append((stage, action, start_s, self.engine.now_s))

    def _transfer(self, stage: int, action: Action) -> Process:
        name = self.link_name(stage, action.peer)
        link = self._links.setdefault(name, self.engine.resource(self.link_capacity))
        with link.request() as turn:
            yield turn
            start_s = self.engine.now_s
            hop = action.chunk if action.kind is ActionKind.SEND_FORWARD else action.chunk - 1
            yield self.engine.wait(float(self.durations.send_s[hop]))
        self.records.append((stage, action, start_s, self.engine.now_s))
        self._arrival(action.kind, action.chunk, action.microbatch).succeed()

    def _arrival(self, kind: ActionKind, chunk: int, microbatch: int) -> simpy.Event:
        return self._arrived.setdefault((kind, chunk, microbatch), self.engine.event())

    def _seconds(self, stage: int, action: Action) -> float:
        if action.kind is ActionKind.REDUCE_GRADIENTS:
            return float(self.durations.reduce_s[stage])
        forward = action.kind is ActionKind.FORWARD
        table = self.durations.forward_s if forward else self.durations.backward_s
        return float(table[action.chunk])
