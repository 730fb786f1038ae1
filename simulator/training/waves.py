"""Step times of many plans with one list, without the list: compute actions in waves.

The replay (replay.py) goes through every entry of a lowered list. Here only compute actions
are kept, with what each receives and sends, and those that no other of them waits for run
as one operation over (stages, candidates): a wave. The recurrence is the same, so the times
are those of the replay; copies to the host and gathers, which the search has inside the
actions that they run beside, are no entries here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.plan.lower import Unit, reduces_gradients, units
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import ScheduleName, chunk_table
from flopwright.plan.schedules.registry import stage_actions
from flopwright.simulator.training.durations import Durations, pair_seconds
from flopwright.simulator.training.program import program_of
from flopwright.simulator.training.replay import replay_step_seconds

Ints = NDArray[np.int64]

# Rows of seconds by chunk, in this order; pairs come after them.
_ROW_OF: Final = {
    ActionKind.FORWARD.value: 0,
    ActionKind.BACKWARD.value: 1,
    ActionKind.BACKWARD_INPUT.value: 2,
    ActionKind.BACKWARD_WEIGHT.value: 3,
}
_FAMILIES: Final = len(_ROW_OF)
_FORWARD, _WEIGHT = 0, 3


@dataclass(frozen=True, slots=True)
class Half:
    """What the actions of a wave wait for and start: indices by place in the wave.

    Attributes:
        came, left: transfers; lane: the link that carries what is sent; hop: the chunk
            before the hop. Where there is nothing they point behind the last one.
    """

    came: Ints
    left: Ints
    lane: Ints
    hop: Ints


@dataclass(frozen=True, slots=True)
class Wave:
    """Units (one compute action, or a pair) of different stages that run side by side.

    Attributes:
        stage, row: of each unit; row is that of the table of seconds.
        halves: one, or two where there are pairs among them.
    """

    stage: Ints
    row: Ints
    halves: tuple[Half, ...]


@dataclass(frozen=True, slots=True)
class Waves:
    """A step's compute in waves.

    Attributes:
        pairs: (row of the first half, row of the second) of each row that is a pair.
        transfers: how many transfers there can be; lanes: links that carry them.
    """

    waves: tuple[Wave, ...]
    num_stages: int
    num_chunks: int
    pairs: Ints
    transfers: int
    lanes: int


@lru_cache(maxsize=64)
def waves_of(schedule: ScheduleName, pp: int, vpp: int, num_microbatches: int) -> Waves:
    """Returns the waves of a schedule's lists."""
    lists = [
        tuple(units(stage_actions(schedule, pp, vpp, stage, num_microbatches)))
        for stage in range(pp)
    ]
    stage_of = np.zeros(pp * vpp, np.int64)
    for row in chunk_table(schedule, pp, vpp):
        stage_of[list(row)] = np.arange(pp)
    return _Table(lists, stage_of, num_microbatches).waves()


class _Table:
    """All stages' units as arrays, (stages, places); short lists are filled up."""

    def __init__(self, lists: Sequence[Sequence[Unit]], stage_of: Ints, m: int) -> None:
        self._stage_of, self._m = stage_of, m
        self._length = np.array([len(x) for x in lists])
        # Transfers are known by side, sending chunk and micro-batch; two more stand for none:
        # one that has always come, one that nobody waits for.
        self._nothing = 2 * len(stage_of) * m
        first, second = (
            [[u[i] if len(u) > i else None for u in x] for x in lists] for i in (0, 1)
        )
        self._halves = [self._half(first)]
        paired = any(len(u) > 1 for x in lists for u in x)
        self._rows = self._halves[0][0]
        self._pairs = np.zeros((0, 2), np.int64)
        if paired:
            self._halves.append(self._half(second))
            self._pair_rows()

    def _half(self, lists: list[list[Action | None]]) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Returns (row, came, left, lane, hop) of one half of every unit."""
        width, chunks = int(self._length.max()), len(self._stage_of)
        kind, chunk, batch = np.full((3, len(lists), width), -1)
        for stage, listed in enumerate(lists):
            codes = [
                (-1, 0, 0) if a is None else (_ROW_OF[a[0]._value_], a[1], a[2]) for a in listed
            ]
            kind[stage, : len(codes)], chunk[stage, : len(codes)], batch[stage, : len(codes)] = (
                np.array(codes).T
            )
        own = np.arange(len(lists))[:, None]
        side = (kind != _FORWARD).astype(np.int64)
        step = 1 - 2 * side
        moves = (kind >= 0) & (kind != _WEIGHT)

        def other(neighbour: Ints) -> NDArray[np.bool_]:
            inside = moves & (neighbour >= 0) & (neighbour < chunks)
            return np.asarray(inside & (self._stage_of[neighbour.clip(0, chunks - 1)] != own))

        def transfer(sender: Ints) -> Ints:
            return np.asarray((side * chunks + sender) * self._m + batch)

        came = np.where(other(chunk - step), transfer(chunk - step), self._nothing)
        sends = other(chunk + step)
        left = np.where(sends, transfer(chunk), self._nothing + 1)
        peer = self._stage_of[(chunk + step).clip(0, chunks - 1)]
        lane = np.where(sends, own * len(lists) + peer, len(lists) ** 2)
        hop = np.where(sends, np.minimum(chunk, chunk + step), chunks)
        return kind * chunks + chunk, came, left, lane, hop

    def _pair_rows(self) -> None:
        rows, second = self._halves[0][0], self._halves[1][0]
        both = np.stack([rows, second], axis=-1)
        paired = second >= 0
        self._pairs, which = np.unique(both[paired], axis=0, return_inverse=True)
        self._rows = rows.copy()
        self._rows[paired] = _FAMILIES * len(self._stage_of) + which.reshape(-1)

    def waves(self) -> Waves:
        """Returns the waves: every unit in the first in which all it waits for has come."""
        came = np.zeros(self._nothing + 2, bool)
        came[self._nothing] = True
        place = np.zeros(len(self._length), np.int64)
        out = []
        while True:
            stage = np.flatnonzero(place < self._length)
            if not len(stage):
                break
            at = place[stage]
            ready = came[self._halves[0][1][stage, at]]
            for half in self._halves[1:]:
                ready = ready & came[half[1][stage, at]]
            stage, at = stage[ready], at[ready]
            if not len(stage):
                raise ValueError("the lists of actions wait for each other")
            halves = tuple(Half(*(v[stage, at] for v in half[1:])) for half in self._halves)
            for sent in halves:
                came[sent.left] = True
            place[stage] += 1
            out.append(Wave(stage, self._rows[stage, at], halves))
        stages, chunks = len(self._length), len(self._stage_of)
        return Waves(tuple(out), stages, chunks, self._pairs, self._nothing, stages**2)


def many_step_seconds(plan: ParallelPlan, durations: Durations, global_batch_size: int) -> Array:
    """Returns the step's seconds of candidates that run the same list as `plan`, (C,).

    As the replay of that list has it, without copies to the host and gathers.
    """
    m = plan.num_microbatches(global_batch_size)
    reduced = reduces_gradients(plan)
    if not (reduced and (plan.zero_stage >= 2 or plan.data_parallel == "fsdp2")):
        waves = waves_of(plan.schedule, plan.pp, plan.vpp, m)
        return wave_step_seconds(waves, durations, reduces=reduced)
    if plan.pp == 1 and plan.zero_stage >= 2 and plan.schedule == "1f1b":
        return _reduced_beside(durations, m)
    return replay_step_seconds(program_of(plan, m), durations)


def _reduced_beside(durations: Durations, m: int) -> Array:
    """Returns the step's seconds of one stage that reduces beside the next micro-batch."""
    each = (durations.forward_s + durations.backward_s).sum(axis=0)
    part = durations.reduce_s[0] / m
    reduced = np.maximum(m * each + part, each + m * part)
    return np.asarray(reduced + durations.norm_s + durations.step_s[0])


def wave_step_seconds(waves: Waves, durations: Durations, *, reduces: bool) -> Array:
    """Returns the step's seconds, (C,), where each stage reduces its gradients at its end.

    Args:
        durations: with a trailing axis of C candidates; copies and gathers are not read.
        reduces: whether ranks reduce gradients at all.
    """
    rows = _rows(waves, durations)
    columns = rows.shape[1]
    free = np.zeros((waves.num_stages, columns))
    lanes = np.zeros((waves.lanes + 1, columns))
    arrived = np.zeros((waves.transfers + 2, columns))
    send_s = np.concatenate([durations.send_s, np.zeros((1, columns))])
    maximum = np.maximum
    for wave in waves.waves:
        now = free[wave.stage]
        for half in wave.halves:
            maximum(now, arrived[half.came], out=now)
        now += rows[wave.row]
        free[wave.stage] = now
        for half in wave.halves:
            end = maximum(now, lanes[half.lane])
            end += send_s[half.hop]
            lanes[half.lane] = end
            arrived[half.left] = end
    if reduces:
        free = free + durations.reduce_s
    together = free.max(axis=0) + durations.norm_s
    return np.asarray(together + durations.step_s.max(axis=0))


def _rows(waves: Waves, durations: Durations) -> Array:
    """Returns the seconds of every row, (rows, C)."""
    zero = np.zeros_like(durations.forward_s)

    def given(values: Array | None) -> Array:
        return zero if values is None else values

    weight = given(durations.weight_s)
    backward = durations.backward_s
    rows = np.concatenate([durations.forward_s, backward, backward - weight, weight])
    if not len(waves.pairs):
        return rows
    again = given(durations.recompute_s)
    out, in_ = given(durations.forward_exchange_s), given(durations.backward_exchange_s)
    exchange = np.concatenate([out, in_, in_, zero])
    # What is made again runs before a pair begins, not inside it.
    before = np.concatenate([zero, again, again, zero])
    own = rows - exchange - before
    first, second = waves.pairs.T
    both = pair_seconds(own[first], exchange[first], own[second], exchange[second])
    return np.concatenate([rows, both + before[first] + before[second]])
