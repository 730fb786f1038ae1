"""Engines of a fleet in simulated time, from completion to completion.

One server is one instance of a generation engine. Its attempts advance together, a step at a
time; while the set does not change, n steps cost n (base + kappa C) + kappa b g n (n - 1) / 2
(b attempts, C tokens of context, g tokens a step), so that no loop runs over tokens. When
the cache is full, the attempt that was admitted last gives its cache back and is prefilled
again later (vLLM's recompute preemption); when one completes, those that wait come in.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence

from flopwright.errors import InputError, Violation
from flopwright.simulator.rollouts.layouts_work import Costs, Work
from flopwright.spec.rollouts.engine import EngineModel

# Share of the cache that is kept free when an attempt comes in (vLLM's watermark).
WATERMARK = 0.01


class Server:
    """One instance: attempts that run, attempts that wait, and its clock.

    Args:
        shared_cache: caches are kept outside; an attempt that goes on pays no prefill.
    """

    def __init__(self, costs: Costs, work: Work, *, shared_cache: bool = False) -> None:
        self.costs, self.work, self.shared_cache = costs, work, shared_cache
        self.now_s = 0.0
        self.step = 0
        self.context = 0.0  # tokens of cache in use
        self.running: dict[int, int] = {}  # id -> step at which it ends, in order of admission
        self.heap: list[tuple[int, int]] = []
        self.waiting: deque[int] = deque()
        self.warm: set[int] = set()  # prompts whose prefix is in the cache
        self.closed = False  # takes nothing in until it is opened again
        self.busy_s = 0.0
        self.context_s = 0.0  # tokens of cache in use, summed over the seconds of work
        self.peak_tokens = 0.0
        # cache that each piece here may grow to, and all together (pooled routing)
        self.promised: dict[int, float] = {}
        self.promised_tokens = 0.0
        self.preempted = 0
        self.prefilled = 0
        self.decoded = 0.0

    @property
    def load(self) -> int:
        """Attempts here, running and waiting."""
        return len(self.running) + len(self.waiting)

    def admit(self) -> None:
        """Lets waiting attempts in as far as there is room; their prefill takes its time."""
        if self.closed:
            return
        costs, work, came = self.costs, self.work, False
        while self.waiting and len(self.running) < costs.limit:
            rid = self.waiting[0]
            tokens = work.tokens[rid]
            need = work.prompt[rid] + tokens + costs.each
            room = costs.capacity * (1 - WATERMARK) if self.running else costs.capacity
            if self.context + need > room:
                break
            self.waiting.popleft()
            self._prefill(rid, tokens, first=not came)
            came = True
            steps = math.ceil((work.target[rid] - tokens) / costs.gain)
            end = self.step + max(1, steps)
            self.running[rid] = end
            heapq.heappush(self.heap, (end, rid))
            self.context += need
        self.peak_tokens = max(self.peak_tokens, self.context)

    def _prefill(self, rid: int, tokens: int, *, first: bool) -> None:
        if self.shared_cache and tokens:
            return  # the cache of an earlier piece is fetched
        prefill, work = self.costs.engine.prefill, self.work
        new, cached = work.prompt[rid] + tokens, 0
        if self.costs.engine.prefix_cache:
            group = work.group[rid]
            if group in self.warm:
                new, cached = max(1, tokens), work.prompt[rid]
            self.warm.add(group)
        self.prefilled += new
        seconds = prefill.work_seconds(new, cached) + (prefill.fixed_s if first else 0.0)
        self.now_s += seconds
        self.busy_s += seconds
        self.context_s += self.context * seconds

    def next_s(self) -> float:
        """Returns when something happens here next: a completion, or a full cache."""
        if not self.running:
            return math.inf
        steps = self._steps_to_event()
        return self.now_s + self.costs.steps_s(len(self.running), self.context, steps)

    def _steps_to_event(self) -> int:
        self._clean()
        until_end = self.heap[0][0] - self.step
        if self.costs.capacity == math.inf:
            return until_end
        grown = len(self.running) * self.costs.gain
        return min(until_end, max(0, int((self.costs.capacity - self.context) // grown)))

    def _clean(self) -> None:
        """Drops heap entries of attempts that were taken away."""
        while self.heap and self.running.get(self.heap[0][1]) != self.heap[0][0]:
            heapq.heappop(self.heap)

    def _go(self, steps: int) -> None:
        active = len(self.running)
        seconds = self.costs.steps_s(active, self.context, steps)
        self.now_s += seconds
        self.busy_s += seconds
        self.step += steps
        grown = active * self.costs.gain * steps
        self.context_s += seconds * (self.context + grown / 2)
        self.decoded += grown
        self.context += grown
        self.peak_tokens = max(self.peak_tokens, self.context)

    def event(self) -> list[int]:
        """Goes to the next event; returns the attempts that reached their target there."""
        self._go(self._steps_to_event())
        done = self._finished()
        if done:
            self.admit()
        else:
            self._make_room()
        return done

    def _finished(self) -> list[int]:
        done: list[int] = []
        self._clean()
        while self.heap and self.heap[0][0] <= self.step:
            rid = heapq.heappop(self.heap)[1]
            del self.running[rid]
            work = self.work
            work.tokens[rid] = work.target[rid]
            self.context -= work.prompt[rid] + work.target[rid] + self.costs.each
            done.append(rid)
            self._clean()
        if not self.running:
            self.context = 0.0
        return done

    def _make_room(self) -> None:
        """Takes the cache of those admitted last until one step of the others fits."""
        while self.context + len(self.running) * self.costs.gain > self.costs.capacity:
            if len(self.running) == 1:
                break  # rounding alone: a context that does not fit was refused before
            rid, end = self.running.popitem()
            self._put_back(rid, end)
            self.waiting.appendleft(rid)
            self.preempted += 1

    def _put_back(self, rid: int, end: int) -> None:
        work, left = self.work, (end - self.step) * self.costs.gain
        tokens = max(work.tokens[rid], min(work.target[rid] - 1, int(work.target[rid] - left)))
        self.context -= work.prompt[rid] + max(tokens, 0) + self.costs.each
        work.tokens[rid] = max(tokens, 0)

    def advance(self, to_s: float) -> None:
        """Goes on to the end of the step that runs at `to_s`; nothing completes before it."""
        if self.now_s >= to_s:
            return
        if not self.running:
            self.now_s = to_s
            return
        inside = self.costs.steps_within(len(self.running), self.context, to_s - self.now_s)
        self._go(min(self._steps_to_event(), math.ceil(inside - 1e-9)))

    def stop(self, at_s: float) -> list[int]:
        """Takes everything away at `at_s`, with its tokens; returns the ids, running first."""
        self.advance(at_s)
        out = [*self.running, *self.waiting]
        for rid, end in self.running.items():
            self._put_back(rid, end)
        self.running, self.heap, self.context = {}, [], 0.0
        self.waiting.clear()
        self.warm.clear()
        return out


class Fleet:
    """Servers on one clock, asked for the next completion of any of them."""

    def __init__(
        self, engine: EngineModel, instances: int, work: Work, *, shared_cache: bool = False
    ) -> None:
        self.costs, self.work = Costs(engine), work
        self.servers = [
            Server(self.costs, work, shared_cache=shared_cache) for _ in range(instances)
        ]
        self._heap: list[tuple[float, int, int]] = []
        self._stamp = [0] * instances

    def add(self, count: int, now_s: float) -> range:
        """Adds servers that start at `now_s`; returns their places."""
        start = len(self.servers)
        for _ in range(count):
            server = Server(self.costs, self.work)
            server.now_s = now_s
            self.servers.append(server)
            self._stamp.append(0)
        return range(start, len(self.servers))

    def give(self, index: int, ids: list[int], now_s: float) -> None:
        """Hands attempts to a server; they wait there until it has room."""
        server = self.servers[index]
        server.advance(now_s)
        server.waiting.extend(ids)
        server.admit()
        self.touch(index)

    def touch(self, index: int) -> None:
        """Says that a server changed: its next event is another one."""
        self._stamp[index] += 1
        at_s = self.servers[index].next_s()
        if at_s < math.inf:
            heapq.heappush(self._heap, (at_s, index, self._stamp[index]))

    def next_s(self) -> float:
        """Returns when something happens next, inf where nothing runs."""
        while self._heap and self._heap[0][2] != self._stamp[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    def event(self) -> tuple[float, int, list[int]]:
        """Runs the next event; returns its time, the server, and what reached its target."""
        self.next_s()
        _, index, _ = heapq.heappop(self._heap)
        server = self.servers[index]
        # completion times are the clock before the prefill of those that come in
        done_s = server.next_s()
        done = server.event()
        self.touch(index)
        return done_s, index, done

    def run(self, on_done: Callable[[float, int, list[int]], None]) -> float:
        """Runs until nothing is left; returns the time of the last completion."""
        last = 0.0
        while self.next_s() < math.inf:
            last, index, done = self.event()
            if done:
                on_done(last, index, done)
        return last


def check_contexts(engine: EngineModel, longest: int) -> None:
    """Refuses a context that the cache of one instance can never hold.

    Raises:
        InputError: with the capacity and what would fit.
    """
    capacity = engine.kv_capacity_tokens
    need = engine.attempt_tokens(longest)
    if capacity is not None and need > capacity:
        raise InputError(
            Violation(
                field="fleet.engine.kv_capacity_tokens",
                value=str(capacity),
                rule=f"one context of {longest} tokens can never finish: it needs {need}",
                limit=str(need),
                nearest_fix=f"more GPUs an instance, or lengths.cap below {capacity}",
            )
        )


def mean_context(servers: Sequence[Server]) -> float:
    """Returns the tokens of cache in use on an instance, on average while it has work."""
    busy_s = sum(s.busy_s for s in servers)
    return sum(s.context_s for s in servers) / busy_s if busy_s > 0 else 0.0
