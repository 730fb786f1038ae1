"""One batch through the engines: when each response is complete, and what each engine did."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from flopwright.simulator.rollouts.layouts_fleet import Fleet as Servers
from flopwright.simulator.rollouts.layouts_fleet import Server, check_contexts, mean_context
from flopwright.simulator.rollouts.layouts_routing import (
    POOLED,
    isolated_choices,
    static_route,
)
from flopwright.simulator.rollouts.layouts_work import Work
from flopwright.spec.rollouts.layout import Fleet

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation phase.

    Attributes:
        finish_s: when each response was complete, [prompts, samples].
        engine_s: when each instance was done.
        peak_tokens: most context an instance held; mean_tokens: on average while it had work;
            preempted: caches taken away; prefilled_tokens: prompt tokens computed, again
            included.
        order: policies' choice, for a report: which route was taken of those tried.
    """

    finish_s: Floats
    engine_s: Floats
    peak_tokens: float
    mean_tokens: float
    preempted: int
    prefilled_tokens: int

    @property
    def seconds(self) -> float:
        """Until the last response."""
        return float(self.engine_s.max())

    @property
    def mean_engine_s(self) -> float:
        """Mean over instances of each one's own time."""
        return float(self.engine_s.mean())

    @property
    def tail_s(self) -> float:
        """Seconds in which at most a tenth of the responses still runs."""
        done = np.sort(self.finish_s.ravel())
        begins = len(done) - len(done) // 10
        return self.seconds - float(done[begins - 1])


def generate(fleet: Fleet, prompt_tokens: int, lengths: Ints, seed: int = 0) -> Generation:
    """Returns the phase in which all of `lengths` [prompts, samples] are generated.

    Raises:
        InputError: a context that no instance can hold.
    """
    check_contexts(fleet.engine, prompt_tokens + int(lengths.max()))
    if fleet.routing in POOLED:
        return _pooled(fleet, prompt_tokens, lengths)
    if fleet.routing == "isolated_groups" and fleet.instances > 1:
        choices = isolated_choices(fleet, lengths, seed)
        tried = [_static(fleet, prompt_tokens, lengths, route) for route in choices]
        return min(tried, key=lambda g: g.seconds)
    if fleet.routing == "least_loaded":
        return _least_loaded(fleet, prompt_tokens, lengths)
    return _static(fleet, prompt_tokens, lengths, static_route(fleet, lengths))


def _work(prompt_tokens: int, lengths: Ints) -> Work:
    flat = lengths.ravel().tolist()
    groups = np.repeat(np.arange(len(lengths)), lengths.shape[1]).tolist()
    return Work([prompt_tokens] * len(flat), flat, groups)


def _static(fleet: Fleet, prompt: int, lengths: Ints, route: list[list[int]]) -> Generation:
    work = _work(prompt, lengths)
    servers = Servers(fleet.engine, fleet.instances, work)
    for index, ids in enumerate(route):
        if ids:
            servers.give(index, ids, 0.0)
    return _finish(servers, work, lengths)


def _least_loaded(fleet: Fleet, prompt: int, lengths: Ints) -> Generation:
    """Groups in turns to the instance with the fewest responses: known lengths help nobody."""
    groups = np.arange(lengths.size).reshape(lengths.shape)
    route: list[list[int]] = [[] for _ in range(fleet.instances)]
    for row in groups.ravel().tolist():
        route[row % fleet.instances].append(row)
    return _static(fleet, prompt, lengths, route)


def _finish(servers: Servers, work: Work, lengths: Ints) -> Generation:
    ends = np.zeros(len(servers.servers))

    def on_done(at_s: float, index: int, done: list[int]) -> None:
        ends[index] = at_s
        for rid in done:
            work.finish_s[rid] = at_s

    servers.run(on_done)
    return _result(servers, work, lengths, ends)


def _result(servers: Servers, work: Work, lengths: Ints, ends: Floats) -> Generation:
    finish = np.array(work.finish_s).reshape(lengths.shape)
    assert not np.isnan(finish).any(), "a response was lost"
    return Generation(
        finish_s=finish,
        engine_s=ends,
        peak_tokens=max(s.peak_tokens for s in servers.servers),
        mean_tokens=mean_context(servers.servers),
        preempted=sum(s.preempted for s in servers.servers),
        prefilled_tokens=sum(s.prefilled for s in servers.servers),
    )


class _Pool:
    """One queue of pieces for all instances; caches live in a pool that all of them reach."""

    def __init__(self, fleet: Fleet, prompt: int, lengths: Ints) -> None:
        self.fleet, self.work = fleet, _work(prompt, lengths)
        self.by_length = fleet.routing == "pooled_longest_first"
        self.servers = Servers(fleet.engine, fleet.instances, self.work, shared_cache=True)
        self.ends = np.zeros(fleet.instances)
        # one probe of each prompt first; then by the longest finished sample of the prompt
        self.longest = [0] * len(lengths)
        self.queue: list[tuple[float, int]] = []
        for rid in range(lengths.size):
            probe = self.by_length and rid % lengths.shape[1] == 0
            heapq.heappush(self.queue, (-np.inf if probe else self._key(rid), rid))

    def _key(self, rid: int) -> float:
        """Returns the priority of a response, the smallest first."""
        if not self.by_length:
            return 0.0 if self.work.tokens[rid] == 0 else -1.0  # resume first, then FIFO
        known = max(self.longest[self.work.group[rid]], self.work.tokens[rid])
        return -float(known) if known else 0.0

    def run(self, lengths: Ints) -> Generation:
        order = list(range(self.fleet.instances))
        filled = True
        while filled and self.queue:  # in turns, so that all start alike
            took = [self._take(self.servers.servers[i], i, 0.0) for i in order]
            filled = any(took)
        for index in order:
            self.servers.touch(index)
        self.servers.run(self._done)
        return _result(self.servers, self.work, lengths, self.ends)

    def _done(self, at_s: float, index: int, done: list[int]) -> None:
        work, server = self.work, self.servers.servers[index]
        for rid in done:
            server.promised_tokens -= server.promised.pop(rid)
            if work.tokens[rid] >= work.length[rid]:
                work.finish_s[rid] = at_s
                self.ends[index] = at_s
                group = work.group[rid]
                self.longest[group] = max(self.longest[group], work.length[rid])
            else:
                heapq.heappush(self.queue, (self._key(rid), rid))
        while self.queue and self._take(server, index, at_s):
            pass
        self.servers.touch(index)

    def _take(self, server: Server, index: int, at_s: float) -> bool:
        """Gives the next piece to a server that can hold all of it."""
        key, rid = self.queue[0]
        fresh = self._key(rid)
        if self.by_length and key != -np.inf and fresh < key:  # its group is known to be longer
            heapq.heapreplace(self.queue, (fresh, rid))
            return self._take(server, index, at_s)
        work, costs = self.work, server.costs
        need = work.prompt[rid] + work.tokens[rid] + self.fleet.chunk_tokens + costs.each
        # What all pieces here may grow to, not what they hold now and a whole piece besides.
        full = server.load >= costs.limit or server.promised_tokens + need > costs.capacity
        if full and server.load:
            return False
        heapq.heappop(self.queue)
        work.target[rid] = min(work.length[rid], work.tokens[rid] + self.fleet.chunk_tokens)
        server.promised[rid] = need
        server.promised_tokens += need
        server.advance(at_s)
        server.waiting.append(rid)
        server.admit()
        return True


def _pooled(fleet: Fleet, prompt: int, lengths: Ints) -> Generation:
    return _Pool(fleet, prompt, lengths).run(lengths)
