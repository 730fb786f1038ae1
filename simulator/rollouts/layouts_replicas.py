"""Instances that generate batches of their own, and the packing of their tails (Laminar).

Every instance takes so many prompts at once, under the newest weights, and takes the next ones
when its last response is done (arXiv 2510.12633). Alone it holds a few long responses for most
of that time. With repacking, instances whose cache use is past its peak are packed into fewer
every few seconds: the emptiest moves its responses to the fullest that has room for them (best
fit under cache and batch limits), where they are prefilled again, and begins a batch of its own.
The trainer takes groups as they are complete and keeps up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from flopwright.simulator.rollouts.layouts_fleet import WATERMARK, Server, check_contexts
from flopwright.simulator.rollouts.layouts_fleet import Fleet as Servers
from flopwright.simulator.rollouts.layouts_lengths import GroupStream
from flopwright.simulator.rollouts.layouts_work import Work
from flopwright.spec.rollouts.layout import LayoutInput, ReplicaBatches

# Long responses are moved on and on: it takes a few steps until there are as many as ever.
WARM_STEPS, KEPT_STEPS = 4, 4


@dataclass(slots=True, kw_only=True)
class ReplicaRun:
    """What the kept steps (of a batch's groups each) showed.

    Attributes:
        seconds: of all kept steps; tokens: decoded in them.
        lags: versions between a group's first token and its completion.
        context_s: tokens of cache in use, summed over instances and their seconds of work.
        moves: times an instance was emptied.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    lags: list[int] = field(default_factory=list)
    peak_tokens: float = 0.0
    context_s: float = 0.0
    busy_s: float = 0.0
    preempted: int = 0
    moves: int = 0


class _Replicas:
    """The state of instances and groups."""

    def __init__(self, given: LayoutInput, layout: ReplicaBatches) -> None:
        self.given, self.layout, self.batch = given, layout, given.batch
        self.work = Work([], [], [])
        self.servers = Servers(given.fleet.engine, given.fleet.instances, self.work)
        self.lengths = self._lengths(
            GroupStream(self.batch.lengths, self.batch.samples, given.seed)
        )
        self.missing: list[int] = []  # samples of each group that are not complete
        self.started: list[int] = []  # version of each group's weights
        self.complete: list[int] = []
        self.peak_tokens = 0.0
        self.moves = 0
        for index in range(given.fleet.instances):
            self.begin(index, 0.0)

    def _lengths(self, stream: GroupStream) -> Iterator[list[int]]:
        while True:
            yield from stream.draw(256).tolist()

    @property
    def version(self) -> int:
        """Updates so far: the trainer keeps up."""
        return len(self.complete) // self.batch.prompts

    def begin(self, index: int, at_s: float) -> None:
        """Gives an empty instance the newest weights and prompts of its own."""
        server = self.servers.servers[index]
        self.peak_tokens = max(self.peak_tokens, server.peak_tokens)
        server.peak_tokens = 0.0
        server.now_s = max(server.now_s, at_s) + self.given.times.sync_s
        for _ in range(self.layout.prompts):
            group = len(self.missing)
            ids = self.work.extend(self.batch.prompt_tokens, next(self.lengths), group)
            self.missing.append(len(ids))
            self.started.append(self.version)
            server.waiting.extend(ids)
        server.admit()
        self.servers.touch(index)

    def event(self) -> float:
        """Goes to the next event; returns its time."""
        at_s, index, done = self.servers.event()
        for rid in done:
            group = self.work.group[rid]
            self.missing[group] -= 1
            if not self.missing[group]:
                self.complete.append(group)
        if not self.servers.servers[index].load:
            self.begin(index, at_s)
        return at_s

    def repack(self, at_s: float) -> None:
        """Packs instances that are past their peak into fewer; those emptied begin anew."""
        past = []
        for index, server in enumerate(self.servers.servers):
            server.advance(at_s)
            self.servers.touch(index)
            if server.running and not server.waiting and server.context < server.peak_tokens:
                past.append(index)
        servers = self.servers.servers
        past.sort(key=lambda i: (servers[i].context, i))
        emptied: set[int] = set()
        filled: set[int] = set()
        for index in past:
            fits = [
                other
                for other in past
                if other not in emptied
                and other != index
                and _has_room(servers[other], servers[index])
            ]
            if index in filled or not fits:
                continue
            place = max(fits, key=lambda i: (servers[i].context, i))
            self._move(index, place, at_s)
            emptied.add(index)
            filled.add(place)

    def _move(self, index: int, place: int, at_s: float) -> None:
        ids = self.servers.servers[index].stop(at_s)
        self.servers.give(place, ids, at_s)
        self.moves += 1
        self.begin(index, at_s)


def _has_room(there: Server, here: Server) -> bool:
    most = there.costs.capacity * (1 - WATERMARK)
    return there.context + here.context <= most and there.load + here.load <= there.costs.limit


def run_replicas(given: LayoutInput, layout: ReplicaBatches) -> ReplicaRun:
    """Returns what instances do in steady state, after WARM_STEPS batches of groups.

    Raises:
        InputError: a context that no instance can hold.
    """
    batch = given.batch
    check_contexts(given.fleet.engine, batch.prompt_tokens + batch.lengths.cap)
    state, out = _Replicas(given, layout), ReplicaRun()
    every = layout.repack_every_s
    began_s, now_s, next_s = 0.0, 0.0, every or 0.0
    warm, last = WARM_STEPS * batch.prompts, (WARM_STEPS + KEPT_STEPS) * batch.prompts
    before: _Sums | None = None
    while len(state.complete) < last:
        if every is not None and state.servers.next_s() >= next_s:
            state.repack(next_s)
            next_s += every
            continue
        now_s = state.event()
        if before is None and len(state.complete) >= warm:
            began_s, before = now_s, _so_far(state)
            warm = len(state.complete)
    assert before is not None
    after = _so_far(state)
    versions = [n // batch.prompts for n in range(warm, len(state.complete))]
    done = zip(versions, state.complete[warm:], strict=True)
    out.lags = [version - state.started[group] for version, group in done]
    out.seconds = now_s - began_s
    out.tokens = after.decoded - before.decoded
    out.context_s, out.busy_s = after.context_s - before.context_s, after.busy_s - before.busy_s
    out.preempted, out.moves = after.preempted - before.preempted, after.moves - before.moves
    out.peak_tokens = max(state.peak_tokens, *(s.peak_tokens for s in state.servers.servers))
    return out


class _Sums(NamedTuple):
    """What all instances did since the start."""

    decoded: float
    context_s: float
    busy_s: float
    preempted: int
    moves: int


def _so_far(state: _Replicas) -> _Sums:
    servers = state.servers.servers
    return _Sums(
        decoded=sum(s.decoded for s in servers),
        context_s=sum(s.context_s for s in servers),
        busy_s=sum(s.busy_s for s in servers),
        preempted=sum(s.preempted for s in servers),
        moves=state.moves,
    )
