"""The longest path through a lowered step: when every action starts and ends.

A max-plus recurrence over the program (Baccelli et al. 1992): an action starts when its
stage is free and, for a receive, when the data have arrived. A link carries one micro-batch
at a time, in the order of the sends; sending does not hold the sender up. Times may be
arrays: one entry a sample or a candidate with the same pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array
from flopwright.plan.schedules.actions import ActionKind
from flopwright.simulator.training.program import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Durations:
    """Seconds of actions; each (chunks or stages, ...) with equal trailing axes.

    Attributes:
        forward_s, backward_s: by chunk.
        send_s: by chunk c: from chunk c to c + 1 and, for gradients, back.
        reduce_s, step_s: by stage; norm_s: what all stages wait for before the step.
    """

    forward_s: Array
    backward_s: Array
    send_s: Array
    reduce_s: Array
    step_s: Array
    norm_s: ArrayLike = 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of every entry of the program, seconds since the step began.

    A send's start and end are those of the transfer on its link; the sender is free at once.
    """

    start_s: Array
    end_s: Array

    @property
    def step_time_s(self) -> Array:
        """Seconds until the last stage is done."""
        return np.asarray(self.end_s.max(axis=0))


def replay(program: Program, durations: Durations) -> Timeline:
    """Returns when every entry of the program runs."""
    if durations.forward_s.ndim == 1:
        return _replay_one(program, durations)
    return _replay_many(program, durations)


def _lookup(durations: Durations) -> dict[ActionKind, tuple[list[Array], int]]:
    """Returns by action kind its seconds by chunk and what to add to the chunk index."""
    send = list(durations.send_s)
    return {
        ActionKind.FORWARD: (list(durations.forward_s), 0),
        ActionKind.BACKWARD: (list(durations.backward_s), 0),
        ActionKind.SEND_FORWARD: (send, 0),
        ActionKind.SEND_BACKWARD: (send, -1),
    }


def _replay_one(program: Program, durations: Durations) -> Timeline:
    """The recurrence on plain numbers."""
    seconds = {k: ([float(x) for x in v], o) for k, (v, o) in _lookup(durations).items()}
    ends: dict[ActionKind, list[float]] = {
        ActionKind.REDUCE_GRADIENTS: [float(x) for x in durations.reduce_s],
        ActionKind.OPTIMIZER_STEP: [float(x) for x in durations.step_s],
    }
    free = [0.0] * program.num_stages
    link: dict[tuple[int, int], float] = {}
    count = len(program.entries)
    start, end = [0.0] * count, [0.0] * count
    last: list[int] = []
    for i, entry in enumerate(program.entries):
        kind, chunk, _, peer, *_ = entry.action
        stage = entry.stage
        if kind in seconds:
            values, shift = seconds[kind]
            if peer >= 0:  # a send: the link works, the stage goes on
                begin = max(free[stage], link.get((stage, peer), 0.0))
                start[i] = begin
                end[i] = link[stage, peer] = begin + values[chunk + shift]
                continue
            start[i] = free[stage]
            end[i] = free[stage] = free[stage] + values[chunk]
        elif entry.waits_for >= 0:
            start[i] = free[stage]
            end[i] = free[stage] = max(free[stage], end[entry.waits_for])
        elif kind is ActionKind.OPTIMIZER_STEP:
            last.append(i)
        else:
            start[i] = free[stage]
            end[i] = free[stage] = free[stage] + ends[kind][stage]
    together = max(free) + float(np.asarray(durations.norm_s))
    for i in last:
        start[i] = together
        end[i] = together + ends[ActionKind.OPTIMIZER_STEP][program.entries[i].stage]
    return Timeline(np.array(start), np.array(end))


def _replay_many(program: Program, durations: Durations) -> Timeline:
    """The same recurrence with a vector at every place."""
    shape = durations.forward_s.shape[1:]
    seconds = _lookup(durations)
    free = np.zeros((program.num_stages, *shape))
    link: dict[tuple[int, int], Array] = {}
    start = np.zeros((len(program.entries), *shape))
    end = np.zeros_like(start)
    last: list[int] = []
    for i, entry in enumerate(program.entries):
        kind, chunk, _, peer, *_ = entry.action
        stage = entry.stage
        start[i] = free[stage]
        if kind in seconds:
            values, shift = seconds[kind]
            if peer >= 0:
                if (stage, peer) in link:
                    np.maximum(start[i], link[stage, peer], out=start[i])
                np.add(start[i], values[chunk + shift], out=end[i])
                link[stage, peer] = end[i]
                continue
            np.add(start[i], values[chunk], out=end[i])
        elif entry.waits_for >= 0:
            np.maximum(start[i], end[entry.waits_for], out=end[i])
        elif kind is ActionKind.OPTIMIZER_STEP:
            last.append(i)
            continue
        else:
            np.add(start[i], durations.reduce_s[stage], out=end[i])
        free[stage] = end[i]
    together = free.max(axis=0) + durations.norm_s
    for i in last:
        start[i] = together
        end[i] = together + durations.step_s[program.entries[i].stage]
    return Timeline(start, end)


def replay_step_seconds(program: Program, durations: Durations) -> Array:
    """Returns only the step's seconds, (...): the same recurrence without keeping the times.

    Several times faster than `replay` for many samples, whose times would not fit a cache.
    """
    shape = durations.forward_s.shape[1:]
    seconds = _lookup(durations)
    free = [np.zeros(shape) for _ in range(program.num_stages)]
    link: dict[tuple[int, int], Array] = {}
    arrives: dict[int, Array] = {}
    for i, entry in enumerate(program.entries):
        kind, chunk, _, peer, *_ = entry.action
        mine = free[entry.stage]
        if entry.waits_for >= 0:
            np.maximum(mine, arrives.pop(entry.waits_for), out=mine)
        elif kind in seconds:
            values, shift = seconds[kind]
            if peer < 0:
                np.add(mine, values[chunk], out=mine)
                continue
            before = link.get((entry.stage, peer))
            start = mine if before is None else np.maximum(mine, before)
            arrives[i] = link[entry.stage, peer] = start + values[chunk + shift]
        elif kind is ActionKind.REDUCE_GRADIENTS:
            np.add(mine, durations.reduce_s[entry.stage], out=mine)
    together = np.max(free, axis=0) + durations.norm_s
    return np.asarray(together + durations.step_s.max(axis=0))
