"""The longest path through a lowered step: when every action starts and ends.

A max-plus recurrence over the program (Baccelli et al. 1992): an action starts when its
stage is free and what it waits for has happened. A link carries one micro-batch at a time,
in the order of the sends; sending does not hold the sender up, and neither does a copy to or
from the host. Times may be arrays: one entry a candidate with the same pipeline, or one a
sample and replica whose ranks are disturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.training.durations import (
    Disturbance,
    Durations,
    disturbed_seconds,
    group_max,
)
from flopwright.simulator.training.program import Code, Op, Program

__all__ = ["Disturbance", "Durations", "Timeline", "replay", "replay_step_seconds"]


# Plain numbers: what is compared for every entry.
_FIRST: Final = int(Op.FIRST)
_LANE: Final = int(Op.LANE)
_RECEIVE: Final = int(Op.RECEIVE)
_SECOND: Final = int(Op.SECOND)
_REDUCE: Final = int(Op.REDUCE)
_STEP: Final = int(Op.STEP)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every entry of the program, seconds since the step began.

    A send's or a copy's start and end are those of the transfer; the stage is free at once.
    A receive's are those of waiting for it.
    """

    start_s: Array
    end_s: Array

    @property
    def step_time_s(self) -> Array:
        """Seconds until the last stage is done."""
        return np.asarray(self.end_s.max(axis=0))


def replay(
    program: Program, durations: Durations, disturbance: Disturbance | None = None
) -> Timeline:
    """Returns when every entry of the program runs, (entries, ...).

    Args:
        disturbance: the trailing axes are then (samples, replicas).
    """
    if disturbance is None and not durations.columns:
        return _replay_one(program, durations)
    run = _Run(program, durations, disturbance)
    start = np.zeros((len(program.codes), *run.shape))
    end = np.zeros_like(start)
    for i, code in enumerate(program.codes):
        start[i], end[i] = run.times(i, code)
        if code.partner >= 0:
            start[code.partner], end[code.partner] = start[i], end[i]
    together = run.together()
    for i in program.steps:
        start[i] = together
        end[i] = together + run.seconds(program.codes[i])
    return Timeline(start, end)


def replay_step_seconds(
    program: Program, durations: Durations, disturbance: Disturbance | None = None
) -> Array:
    """Returns only the step's seconds, (...), or (samples,) of a disturbed step.

    Several times faster than `replay` for many samples, whose times would not fit a cache.
    """
    if disturbance is None and not durations.columns:
        return _replay_one(program, durations).step_time_s
    if disturbance is None:
        return _step_seconds_alone(program, durations)
    run = _Run(program, durations, disturbance)
    for i, code in enumerate(program.codes):
        run.times(i, code)
    together = run.together()
    ends = [together + run.seconds(program.codes[i]) for i in program.steps]
    return np.asarray(np.max(ends, axis=0).max(axis=-1))


class _Run:
    """The recurrence with an array at every place, entry after entry."""

    def __init__(
        self, program: Program, durations: Durations, disturbance: Disturbance | None
    ) -> None:
        self._program = program
        self._disturbed = disturbance is not None
        if disturbance is None:
            self.shape = durations.columns
            own, exchange = durations.parts(program)
            self._rows = own + exchange
        else:
            self.shape = (disturbance.samples, disturbance.replicas)
            self._group = disturbance.group
            self._own, self._exchange = disturbed_seconds(program, durations, disturbance)
        self._norm = durations.norm_s
        self._free = [np.zeros(self.shape) for _ in range(program.num_stages)]
        self._lane = [np.zeros(self.shape) for _ in program.lanes]
        self._ends: dict[int, Array] = {}

    def seconds(self, code: Code) -> Array:
        """Returns how long an entry takes by itself."""
        if not self._disturbed:
            return np.asarray(self._rows[code.row])
        mine = self._own[code.stage][code.place] + self._exchange[code.stage][code.place]
        return np.asarray(mine)

    def times(self, i: int, code: Code) -> tuple[Array, Array]:
        """Returns (start, end) of an entry, and takes note of them; a step ends at its start."""
        stage = code.stage
        begin = ready = self._free[stage]
        if code.op == _FIRST:
            return begin, begin
        for source in self._program.waits(code):
            ready = np.maximum(ready, self._ends[source])
        if code.op == _RECEIVE:
            del self._ends[code.waits_for[0]]  # nobody else waits for it
            self._free[stage] = ready
            return begin, ready
        if code.op == _LANE:
            begin = np.maximum(ready, self._lane[code.lane])
            end = begin + self.seconds(code)
            self._lane[code.lane] = self._ends[i] = end
            return begin, end
        if code.op == _STEP:
            self._free[stage] = ready
            return ready, ready
        begin, end = self._hold(code, ready)
        self._free[stage] = end
        return begin, end

    def _hold(self, code: Code, ready: Array) -> tuple[Array, Array]:
        """Returns the times of what holds its stage, replicas waiting for each other."""
        if not self._disturbed:
            return ready, ready + self.seconds(code)
        if code.op == _REDUCE:
            begin = group_max(ready, self.shape[-1])
            return begin, begin + self.seconds(code)
        if self._group > 1 and code.op == _SECOND:
            ready = group_max(ready, self._group)
        elif self._group > 1 and (exchange := self._exchange[code.stage][code.place]).any():
            worked = ready + self._own[code.stage][code.place]
            return ready, group_max(worked, self._group) + exchange
        return ready, ready + self.seconds(code)

    def together(self) -> Array:
        """Returns when every stage of every replica has come to its step, the norm summed."""
        latest = np.max(self._free, axis=0)
        if self._disturbed:
            latest = group_max(latest, self.shape[-1])
        return np.asarray(latest + self._norm)


def _replay_one(program: Program, durations: Durations) -> Timeline:
    """The recurrence on plain numbers."""
    own, exchange = durations.parts(program)
    seconds: list[float] = (own + exchange).tolist()
    free = [0.0] * program.num_stages
    lanes = [0.0] * len(program.lanes)
    start, end = [0.0] * len(program.codes), [0.0] * len(program.codes)
    last: list[int] = []
    for i, (op, stage, _, lane, row, waits, partner) in enumerate(program.codes):
        begin = ready = free[stage]
        if partner >= 0:
            waits = program.waits(program.codes[i])
        for source in waits:
            ready = max(ready, end[source])
        if op == _RECEIVE:
            start[i], end[i] = begin, ready
            free[stage] = ready
        elif op == _LANE:
            start[i] = begin = max(ready, lanes[lane])
            end[i] = lanes[lane] = begin + seconds[row]
        elif op == _STEP:
            last.append(i)
            free[stage] = ready
        elif op != _FIRST:
            start[i] = ready
            end[i] = free[stage] = ready + seconds[row]
            if partner >= 0:
                start[partner], end[partner] = ready, end[i]
    together = max(free) + float(np.asarray(durations.norm_s))
    for i in last:
        start[i] = together
        end[i] = together + seconds[program.codes[i].row]
    return Timeline(np.array(start), np.array(end))


def _step_seconds_alone(program: Program, durations: Durations) -> Array:
    """The recurrence without keeping times that nobody waits for any more."""
    own, exchange = durations.parts(program)
    rows = list(np.asarray(own + exchange, float))
    shape = durations.columns
    free = [np.zeros(shape) for _ in range(program.num_stages)]
    lanes = [np.zeros(shape) for _ in program.lanes]
    ends: dict[int, Array] = {}
    steps = []
    add, maximum = np.add, np.maximum
    for i, (op, stage, _, lane, row, waits, partner) in enumerate(program.codes):
        mine = free[stage]
        if op == _RECEIVE:
            maximum(mine, ends.pop(waits[0]), out=mine)
            continue
        if op == _LANE:
            ready = maximum(mine, lanes[lane])
            for source in waits:
                maximum(ready, ends[source], out=ready)
            lanes[lane] = ends[i] = ready + rows[row]
            continue
        if partner >= 0:
            waits = program.waits(program.codes[i])
        for source in waits:
            maximum(mine, ends[source], out=mine)
        if op == _STEP:
            steps.append(row)
        elif op != _FIRST:
            add(mine, rows[row], out=mine)
    together = np.max(free, axis=0) + durations.norm_s
    return np.asarray(together + np.max([rows[r] for r in steps], axis=0))
