"""One training step on the event engine: the reference that the replay must equal.

Ranks are processes that go through their lists; links and copy engines are resources. With
private links the times are those of training/replay.py. With shared links, transfers that
are on a link at the same time slow each other down (network.py), and with them whoever waits.

A rank here is a stage of a data-parallel replica. The ranks of its tensor- and context-
parallel group move in step, and replicas that nothing tells apart are one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import simpy
from simpy.events import Event, Timeout

from flopwright.ops import Array
from flopwright.simulator.engine.engine import Process
from flopwright.simulator.engine.links import Links, Routes, routes_of
from flopwright.simulator.engine.network import Network, Path
from flopwright.simulator.engine.seconds import RankSeconds
from flopwright.simulator.training.durations import Disturbance, Durations
from flopwright.simulator.training.program import Op, Program

# Plain numbers: what is compared for every entry.
_LANE: Final = int(Op.LANE)
_RECEIVE: Final = int(Op.RECEIVE)
_COMPUTE: Final = int(Op.COMPUTE)
_SECOND: Final = int(Op.SECOND)
_REDUCE: Final = int(Op.REDUCE)
_STEP: Final = int(Op.STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """What happened, seconds since the step began.

    Attributes:
        start_s, end_s: of every entry of the program, (replicas, entries); a send's or a
            copy's are those of the transfer, a receive's of the wait for it.
        worked_s, exchange_s: when an action's own work ended and its exchange with other
            replicas began, (replicas, entries); not a number where they were not told apart.
        num_events: events that the engine went through.
    """

    start_s: Array
    end_s: Array
    worked_s: Array
    exchange_s: Array
    step_time_s: float
    num_events: int

    @property
    def replicas(self) -> int:
        """Replicas that were simulated one by one; 1 where nothing tells them apart."""
        return len(self.start_s)


def run_step(
    program: Program,
    durations: Durations,
    *,
    replicas: int = 1,
    links: Links | None = None,
    disturbance: Disturbance | None = None,
    sample: int = 0,
) -> StepRun:
    """Returns one step of the program in simulated time.

    Args:
        durations: of one plan (no trailing axis).
        replicas: data-parallel replicas; those of a disturbance, where there is one.
        links: which links transfers share; None gives each transfer its own.
        disturbance: how ranks differ; `sample` picks one of its samples.
    """
    if disturbance is not None:
        replicas = disturbance.replicas
    routes = None
    if links is not None:
        routes = routes_of(program, links, replicas, fold=disturbance is None)
    count = replicas if disturbance is not None else routes.replicas if routes else 1
    step = _Step(program, durations, count, routes, disturbance, sample)
    return step.run()


class _Meeting:
    """Ranks that wait until all of them have come."""

    __slots__ = ("event", "missing")

    def __init__(self, environment: simpy.Environment, size: int) -> None:
        self.event, self.missing = Event(environment), size


# An entry as a rank sees it: index in the program, Op, lane, what it waits for, its partner.
_Item = tuple[int, int, int, tuple[int, ...], int]


class _Step:
    def __init__(
        self,
        program: Program,
        durations: Durations,
        replicas: int,
        routes: Routes | None,
        disturbance: Disturbance | None,
        sample: int,
    ) -> None:
        self._env = simpy.Environment()
        self._program, self._replicas, self._routes = program, replicas, routes
        self._network = None if routes is None else Network(self._env, routes.capacities)
        self._disturbed = disturbance is not None
        self._group = 1 if disturbance is None else disturbance.group
        self._norm_s = float(np.asarray(durations.norm_s))
        self._lists: list[list[_Item]] = [[] for _ in range(program.num_stages)]
        for i, c in enumerate(program.codes):
            self._lists[c.stage].append((i, c.op, c.lane, program.waits(c), c.partner))
        self._seconds = RankSeconds(program, durations, disturbance, sample)
        count = len(program.codes)
        self._start = [[0.0] * count for _ in range(replicas)]
        self._end = [[0.0] * count for _ in range(replicas)]
        self._apart: list[dict[int, tuple[float, float]]] = [{} for _ in range(replicas)]
        # Of what a lane does: None, True once it is done, or the event that is waited for.
        self._state: list[list[Any]] = [[None] * count for _ in range(replicas)]
        self._lanes = [[_LaneState() for _ in program.lanes] for _ in range(replicas)]
        self._meetings: dict[tuple[int, ...], _Meeting] = {}

    def run(self) -> StepRun:
        """Runs until every rank is done."""
        ranks = [
            self._env.process(self._rank(stage, replica))
            for replica in range(self._replicas)
            for stage in range(self._program.num_stages)
        ]
        self._env.run()
        assert not any(rank.is_alive for rank in ranks), "every rank comes to its list's end"
        end = np.array(self._end)
        apart = np.full((*end.shape, 2), np.nan)
        for replica, found in enumerate(self._apart):
            if found:
                apart[replica, list(found)] = list(found.values())
        return StepRun(
            start_s=np.array(self._start),
            end_s=end,
            worked_s=apart[..., 0],
            exchange_s=apart[..., 1],
            step_time_s=float(end.max()),
            num_events=next(self._env._eid),
        )

    def _rank(self, stage: int, replica: int) -> Process:
        """Goes through a rank's list."""
        env, start, end = self._env, self._start[replica], self._end[replica]
        state, grouped = self._state[replica], self._group > 1
        seconds, exchange = self._seconds.of(stage, replica)
        apart = self._disturbed or (
            self._routes is not None and self._routes.exchange[replica][stage]
        )
        for place, (i, op, lane, waits, partner) in enumerate(self._lists[stage]):
            if op == _LANE:
                self._ask(stage, replica, lane, i, waits, seconds[place])
                continue
            begin = env.now
            for source in waits:
                if state[source] is None:
                    state[source] = Event(env)
                if state[source] is not True:
                    yield state[source]
            if op == _RECEIVE:
                start[i], end[i] = begin, env.now
            elif op == _COMPUTE:
                start[i] = env.now
                if apart and exchange[place]:
                    yield Timeout(env, seconds[place])
                    yield from self._trade(stage, replica, i, exchange[place])
                else:
                    yield Timeout(env, seconds[place] + exchange[place])
                end[i] = env.now
            elif op == _SECOND:
                if grouped:
                    yield from self._meet((i, replica // self._group), self._group)
                start[i] = start[partner] = env.now
                yield Timeout(env, seconds[place])
                end[i] = end[partner] = env.now
                pair = self._seconds.pair(i, replica)
                if pair is not None:
                    began = max(start[i], env.now - pair[1])
                    self._apart[replica][i] = (start[i] + pair[0], began)
            elif op == _REDUCE:
                yield from self._meet((i,), self._replicas)
                start[i] = env.now
                path = () if self._routes is None else self._routes.reduce[replica][stage]
                yield self._move(path, seconds[place])
                yield from self._meet((i, -1), self._replicas)
                end[i] = env.now
            elif op == _STEP:
                yield from self._meet((), self._replicas * self._program.num_stages)
                yield Timeout(env, self._norm_s)
                start[i] = env.now
                if exchange[place]:
                    self._apart[replica][i] = (env.now + seconds[place],) * 2
                yield Timeout(env, seconds[place] + exchange[place])
                end[i] = env.now

    def _trade(self, stage: int, replica: int, i: int, seconds: float) -> Process:
        """Exchanges tokens with the other replicas of the group, once all have come to it."""
        worked_s = self._env.now
        if self._group > 1:
            yield from self._meet((i, replica // self._group), self._group)
        self._apart[replica][i] = (worked_s, self._env.now)
        path = () if self._routes is None else self._routes.exchange[replica][stage]
        yield self._move(path, seconds)

    def _move(self, path: Path, seconds: float) -> Event:
        """Returns the end of a transfer."""
        if self._network is None or not path:
            return Timeout(self._env, seconds)
        done = Event(self._env)
        self._network.start(path, seconds, done.succeed)
        return done

    def _meet(self, key: tuple[int, ...], size: int) -> Process:
        """Waits until `size` ranks have come to the meeting."""
        if size == 1:
            return
        meeting = self._meetings.get(key)
        if meeting is None:
            meeting = self._meetings[key] = _Meeting(self._env, size)
        meeting.missing -= 1
        if meeting.missing:
            yield meeting.event
        else:
            del self._meetings[key]
            meeting.event.succeed()

    def _ask(
        self, stage: int, replica: int, lane: int, i: int, waits: tuple[int, ...], seconds: float
    ) -> None:
        """Queues what a lane is to do."""
        queue = self._lanes[replica][lane]
        queue.waiting.append((i, waits, seconds))
        if not queue.busy:
            queue.busy = True
            self._next(replica, lane)

    def _next(self, replica: int, lane: int, _: Any = None) -> None:
        """Lets a lane begin the first thing in its queue, as soon as that can begin."""
        queue, state = self._lanes[replica][lane], self._state[replica]
        i, waits, seconds = queue.waiting[0]
        for source in waits:
            if state[source] is None:
                state[source] = Event(self._env)
            if state[source] is not True:
                state[source].callbacks.append(lambda _: self._next(replica, lane))
                return
        queue.waiting.popleft()
        self._start[replica][i] = self._env.now
        path = () if self._routes is None else self._routes.lanes[replica][lane]
        if self._network is None or not path:
            event = Timeout(self._env, seconds)
            event.callbacks.append(lambda _: self._finish(replica, lane, i))
        else:
            self._network.start(path, seconds, lambda: self._finish(replica, lane, i))

    def _finish(self, replica: int, lane: int, i: int) -> None:
        self._end[replica][i] = self._env.now
        state, queue = self._state[replica], self._lanes[replica][lane]
        waiter, state[i] = state[i], True
        if waiter is not None:
            waiter.succeed()
        if queue.waiting:
            self._next(replica, lane)
        else:
            queue.busy = False


class _LaneState:
    """A link's or copy engine's queue: first come, first served, one at a time."""

    __slots__ = ("busy", "waiting")

    def __init__(self) -> None:
        self.busy = False
        self.waiting: deque[tuple[int, tuple[int, ...], float]] = deque()
