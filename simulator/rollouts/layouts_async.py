"""A stream of groups beside a trainer: staleness bound, interruption, order, lent GPUs.

Engines take new prompts while fewer than `max_in_flight` are generated and the n-th prompt
obeys floor((n - 1) / B) <= version + eta (AReaL's admission, B prompts a step). The trainer
takes a batch as soon as there is one; after `sync_every` of them the engines get new weights.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from flopwright.simulator.rollouts.layouts_fleet import Fleet as Servers
from flopwright.simulator.rollouts.layouts_fleet import check_contexts, mean_context
from flopwright.simulator.rollouts.layouts_lengths import GroupStream
from flopwright.simulator.rollouts.layouts_work import Work
from flopwright.spec.rollouts.layout import FullyAsync, LayoutInput

WARM_STEPS, KEPT_STEPS = 3, 4


@dataclass(slots=True, kw_only=True)
class AsyncRun:
    """What the kept steps of a stream showed.

    Attributes:
        step_s: seconds between synchronisations; wait_s: of them, the trainer without a batch.
        tokens: prompt and response tokens trained a step.
        lags: versions between a response's first token and its training, one a response.
        in_flight: responses that ran at each synchronisation.
        prefilled: tokens prefilled, again included; generated: tokens decoded, all steps.
    """

    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    in_flight: list[int] = field(default_factory=list)
    preempted: int = 0
    peak_tokens: float = 0.0
    mean_tokens: float = 0.0


class _Stream:
    """The state of engines, buffer and trainer."""

    def __init__(self, given: LayoutInput, layout: FullyAsync) -> None:
        batch = given.batch
        self.given, self.layout, self.batch = given, layout, batch
        self.work = Work([], [], [])
        self.servers = Servers(given.fleet.engine, given.fleet.instances, self.work)
        self.lengths = self._lengths(GroupStream(batch.lengths, batch.samples, given.seed))
        self.open = set(range(given.fleet.instances))  # servers that take work
        self.now_s = 0.0
        self.version = 0
        self.submitted = 0
        self.in_flight = 0
        self.missing: list[int] = []  # samples of each prompt that are not complete
        self.started: list[list[int]] = []  # version of each response's first token, by prompt
        self.ready: list[int] = []  # heap of complete prompts, by the order they are taken in
        self.completed = 0
        self.lent: range = range(0)
        self.draining: dict[int, float] = {}  # engines that wait, and the seconds of their sync

    def _lengths(self, stream: GroupStream) -> Iterator[list[int]]:
        while True:
            yield from stream.draw(256).tolist()

    def may_start(self) -> bool:
        """Returns whether one more prompt is let in."""
        most, eta = self.layout.max_in_flight, self.layout.staleness
        if most is not None and self.in_flight >= most:
            return False
        return eta is None or self.submitted < (self.version + eta + 1) * self.batch.prompts

    def fill(self) -> None:
        """Starts the prompts that are let in, sample by sample where the least is to do."""
        if not self.may_start():
            return
        loads = [(self.servers.servers[i].load, i) for i in sorted(self.open)]
        heapq.heapify(loads)
        given: dict[int, list[int]] = {}
        while self.may_start():
            ids = self.work.extend(self.batch.prompt_tokens, next(self.lengths), self.submitted)
            self.submitted += 1
            self.in_flight += 1
            self.missing.append(len(ids))
            self.started.append([self.version] * len(ids))
            for rid in ids:
                load, index = loads[0]
                given.setdefault(index, []).append(rid)
                heapq.heapreplace(loads, (load + 1, index))
        for index, ids_of in given.items():
            self.servers.give(index, ids_of, self.now_s)

    def finish(self, done: list[int]) -> None:
        """Counts responses that are complete; whole prompts go into the buffer."""
        for rid in done:
            prompt = self.work.group[rid]
            self.missing[prompt] -= 1
            if self.missing[prompt] == 0:
                self.in_flight -= 1
                key = prompt if self.layout.order == "submission" else self.completed
                self.completed += 1
                heapq.heappush(self.ready, (key << 32) | prompt)

    def take(self, count: int, taken: int) -> list[int] | None:
        """Returns the next prompts to train on, or None while they are not complete.

        Args:
            taken: prompts trained before, for the order of submission.
        """
        if len(self.ready) < count:
            return None
        if self.layout.order == "submission":
            first = sorted(self.ready)[:count]
            if [k & 0xFFFFFFFF for k in first] != list(range(taken, taken + count)):
                return None
        return [heapq.heappop(self.ready) & 0xFFFFFFFF for _ in range(count)]

    def synchronise(self, sync_s: float) -> int:
        """Gives the engines new weights; returns how many responses ran."""
        self.version += 1
        running = 0
        for index in sorted(self.open):
            server = self.servers.servers[index]
            running += server.load
            if self.layout.on_sync == "drain" and server.running:
                server.advance(self.now_s)
                server.closed = True
                self.draining[index] = sync_s
                continue
            if self.layout.on_sync == "interrupt":
                ids = server.stop(self.now_s)
                server.now_s = max(server.now_s, self.now_s) + sync_s
                server.waiting.extend(ids)
                server.admit()
            else:
                server.advance(self.now_s)
                server.now_s += sync_s
            self.servers.touch(index)
        self._mark_started()
        return running

    def drained(self, index: int) -> None:
        """Opens an engine that was waiting for its last response, under the new weights."""
        server = self.servers.servers[index]
        if index in self.draining and not server.running:
            server.now_s += self.draining.pop(index)
            server.closed = False
            server.admit()
            self.servers.touch(index)

    def _mark_started(self) -> None:
        """A response that has no token yet begins under the new version."""
        for index in self.open:
            for rid in self.servers.servers[index].waiting:
                if self.work.tokens[rid] == 0:
                    prompt = self.work.group[rid]
                    self.started[prompt][rid % self.batch.samples] = self.version

    def lend(self) -> None:
        """Opens engines on the trainer's GPUs and moves a fair share of what waits there."""
        count = self.layout.lend_instances or 0
        self.lent = self.servers.add(count, self.now_s + self.layout.lend_s)
        moved = self._spread(len(self.open) / (len(self.open) + count))
        self.open.update(self.lent)
        for place, rid in enumerate(moved):
            index = self.lent[place % count]
            self.servers.servers[index].waiting.append(rid)
        for index in self.lent:
            self.servers.servers[index].admit()
            self.servers.touch(index)
        self.fill()

    def _spread(self, keep: float) -> list[int]:
        """Takes from every server what is beyond its share, newest first; prefilled again."""
        moved: list[int] = []
        for index in sorted(self.open):
            server = self.servers.servers[index]
            ids = server.stop(self.now_s)
            stay = math.ceil(len(ids) * keep)
            moved.extend(ids[stay:])
            server.waiting.extend(ids[:stay])
            server.admit()
            self.servers.touch(index)
        return moved

    def give_back(self) -> None:
        """Closes the lent engines; what ran there goes on elsewhere, prefilled again."""
        left: list[int] = []
        for index in self.lent:
            left.extend(self.servers.servers[index].stop(self.now_s))
            self.open.discard(index)
            self.servers.touch(index)
        self.lent = range(0)
        stay = sorted(self.open)
        for place, rid in enumerate(left):
            self.servers.servers[stay[place % len(stay)]].waiting.append(rid)
        for index in stay:
            self.servers.give(index, [], self.now_s)


def run_async(given: LayoutInput, steps: int = WARM_STEPS + KEPT_STEPS) -> AsyncRun:
    """Returns the kept steps of a stream (those after WARM_STEPS)."""
    layout = given.layout
    assert isinstance(layout, FullyAsync)
    batch = given.batch
    check_contexts(given.fleet.engine, batch.prompt_tokens + batch.lengths.cap)
    stream, out = _Stream(given, layout), AsyncRun()
    each = batch.prompts // layout.sync_every
    mean = (batch.prompt_tokens + mean_length(given)) * batch.responses
    token_s = (given.times.update_s + given.times.log_prob_s) / mean
    taken, begun_s = 0, 0.0
    for step in range(steps):
        waited, trained, lags = 0.0, 0, []
        for _ in range(layout.sync_every):
            prompts, wait_s = _next_batch(stream, each, taken)
            waited += wait_s
            taken += each
            tokens, found = _trained(stream, prompts)
            trained += tokens
            lags.extend(found)
            _run_to(stream, stream.now_s + tokens * token_s)
        _run_to(stream, stream.now_s + given.driver_s)
        running = stream.synchronise(given.times.sync_s)
        stream.now_s += given.times.sync_s + given.times.switch_s
        stream.fill()
        if step >= min(WARM_STEPS, steps - 1):
            out.step_s.append(stream.now_s - begun_s)
            out.wait_s.append(waited)
            out.tokens.append(trained)
            out.lags.extend(lags)
            out.in_flight.append(running)
        begun_s = stream.now_s
    out.preempted = sum(s.preempted for s in stream.servers.servers)
    out.peak_tokens = max(s.peak_tokens for s in stream.servers.servers)
    out.mean_tokens = mean_context(stream.servers.servers)
    return out


def mean_length(given: LayoutInput) -> float:
    """Returns the mean tokens of a response, of draws where it is not given."""
    lengths = given.batch.lengths
    if lengths.mean is not None:
        return float(lengths.mean)
    sample = GroupStream(lengths, given.batch.samples, given.seed).draw(4096)
    return float(np.mean(sample))


def _next_batch(stream: _Stream, count: int, taken: int) -> tuple[list[int], float]:
    """Returns the prompts of the next optimizer batch and how long the trainer waited."""
    stream.fill()
    began_s, layout = stream.now_s, stream.layout
    found = stream.take(count, taken)
    lend = layout.lend_below is not None and len(stream.ready) < layout.lend_below * count
    if found is None and lend:
        stream.lend()
    while found is None:
        at_s = stream.servers.next_s()
        assert at_s < math.inf, "the trainer waits for prompts that nobody generates"
        _event(stream)
        found = stream.take(count, taken)
    if len(stream.lent):
        stream.give_back()
        _run_to(stream, stream.now_s + layout.lend_s)
    return found, stream.now_s - began_s


def _event(stream: _Stream) -> None:
    at_s, index, done = stream.servers.event()
    stream.now_s = max(stream.now_s, at_s)
    stream.drained(index)
    if done:
        stream.finish(done)
        stream.fill()


def _run_to(stream: _Stream, until_s: float) -> None:
    """Lets the engines go on while the trainer works."""
    while stream.servers.next_s() <= until_s:
        _event(stream)
    stream.now_s = until_s


def _trained(stream: _Stream, prompts: list[int]) -> tuple[int, list[int]]:
    work, samples, tokens = stream.work, stream.batch.samples, 0
    lags: list[int] = []
    for prompt in prompts:
        ids = range(prompt * samples, (prompt + 1) * samples)
        tokens += sum(work.prompt[i] + work.length[i] for i in ids)
        lags.extend(stream.version - v for v in stream.started[prompt])
    return tokens, lags
