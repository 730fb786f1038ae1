"""Fully asynchronous generation: how many policy versions a sample is behind when trained on.

Two admissions of the public systems. Capacity: C attempts always run, a trainer takes B
complete ones at a time. Version: sample n may start only while floor((n - 1) / B) <= i + eta
at trainer version i (AReaL). What is trained on, and in which order, decides whether eta is
a bound: in order of submission it is, in order of completion it is not.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flopwright.simulator.rollouts.lengths import Floats, Ints

Order = Literal["submission", "completion"]
Rule = Literal["none", "wait", "drop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncReport:
    """What a trainer saw.

    Attributes:
        lags: versions behind of each sample trained on, in order.
        seconds: from start to the last update; `versions` updates in them.
        dropped: complete samples that were too old and thrown away.
        idle_s: seconds in which the trainer waited for samples.
    """

    lags: Ints
    seconds: float
    versions: int
    dropped: int
    idle_s: float

    @property
    def seconds_per_version(self) -> float:
        """Mean seconds from update to update."""
        return self.seconds / self.versions


class _Trainer:
    """One trainer with a pool of running samples in front of it."""

    def __init__(
        self, durations: Iterator[float], batch: int, concurrent: int, train_s: float
    ) -> None:
        self.durations, self.batch = durations, batch
        self.concurrent, self.train_s = concurrent, train_s
        self.now_s, self.version, self.started = 0.0, 0, 0
        self.running: list[tuple[float, int, int]] = []  # (end, number, version at start)
        self.done: list[tuple[float, int, int]] = []
        self.lags: list[int] = []
        self.dropped = 0
        self.idle_s = 0.0
        self.busy_until_s: float | None = None

    def start(self, max_lag: int | None) -> None:
        """Starts samples while there is room and the admission allows it."""
        while len(self.running) < self.concurrent and (
            max_lag is None
            or (self.started - self.dropped) // self.batch <= self.version + max_lag
        ):
            self.started += 1
            end_s = self.now_s + next(self.durations)
            heapq.heappush(self.running, (end_s, self.started, self.version))

    def consume(self, order: Order, rule: Rule, max_lag: int | None) -> None:
        """Takes a batch into training, if one is there and its turn has come."""
        if rule == "drop" and max_lag is not None:
            fresh = [d for d in self.done if self.version - d[2] <= max_lag]
            self.dropped += len(self.done) - len(fresh)
            self.done = fresh
        # Who waits for the old takes them first: by the admission no more than a batch of
        # them can reach the limit together.
        if rule == "wait":
            self.done.sort(key=lambda d: (d[2], d[0]))
        else:
            self.done.sort(key=lambda d: d[1] if order == "submission" else d[0])
        batch = self.done[: self.batch]
        if len(batch) < self.batch:
            return
        if order == "submission" and rule != "drop":
            last = (self.version + 1) * self.batch
            if any(number > last for _, number, _ in batch):
                return
        if rule == "wait" and max_lag is not None:
            oldest = min((v for _, _, v in self.running), default=self.version)
            if self.version + 1 - oldest > max_lag:
                return  # a sample still running would be too old at the next update
        self.lags += [self.version - version for _, _, version in batch]
        del self.done[: self.batch]
        self.busy_until_s = self.now_s + self.train_s

    def step(self) -> None:
        """Moves on to the next event: a sample ends or an update does."""
        next_s = self.running[0][0] if self.running else np.inf
        if self.busy_until_s is not None and self.busy_until_s <= next_s:
            self.now_s, self.busy_until_s = self.busy_until_s, None
            self.version += 1
            return
        if self.busy_until_s is None:
            self.idle_s += next_s - self.now_s
        self.now_s = next_s
        self.done.append(heapq.heappop(self.running))


def admission(
    durations: Floats,
    *,
    batch: int,
    concurrent: int,
    versions: int,
    train_s: float,
    max_lag: int | None,
    order: Order = "submission",
    rule: Rule = "none",
) -> AsyncReport:
    """Returns what a trainer sees over so many updates.

    Args:
        durations: seconds of the first, second, ... sample; enough of them.
        batch: samples of an update; concurrent: samples that run at once.
        max_lag: eta; None: samples start whenever there is room.
        order: in which complete samples are trained on.
        rule: "wait": no update while it would make a running sample too old; "drop": too old
            samples are thrown away.
    """
    trainer = _Trainer(iter(durations.tolist()), batch, concurrent, train_s)
    while trainer.version < versions:
        trainer.start(max_lag)
        if trainer.busy_until_s is None:
            trainer.consume(order, rule, max_lag)
        trainer.step()
    return AsyncReport(
        lags=np.array(trainer.lags, dtype=np.int64),
        seconds=trainer.now_s,
        versions=versions,
        dropped=trainer.dropped,
        idle_s=trainer.idle_s,
    )


def mean_updates_crossed(concurrent: int, batch: int) -> float:
    """Returns the mean updates during one sample where generation binds: C / B (Little)."""
    return concurrent / batch


def queue_loop(
    samples_s: Floats,
    *,
    concurrent: int,
    batch: int,
    queue_batches: float,
    train_s: float,
    versions: int,
) -> AsyncReport:
    """Returns the lags of a loop whose groups wait in a bounded queue for the trainer.

    `concurrent` samples run at once, started group by group; a group enters the queue when all
    its samples are complete. While one stands outside a full queue nothing new starts.

    Args:
        samples_s: float[groups, samples], seconds of each sample.
    """
    size = samples_s.shape[1]
    room, need = max(1, round(queue_batches * batch / size)), max(1, batch // size)
    order = iter(enumerate(samples_s.ravel().tolist()))
    now_s, version, busy_s, idle_s = 0.0, 0, np.inf, 0.0
    running: list[tuple[float, int]] = []
    begun: dict[int, int] = {}  # version at which a group's first sample started
    left: dict[int, int] = {}
    outside: list[int] = []
    queue: list[int] = []
    lags: list[int] = []
    while version < versions:
        while outside and len(queue) < room:
            queue.append(outside.pop(0))
        if busy_s == np.inf and len(queue) >= need:
            lags += [version - v for v in queue[:need]]
            del queue[:need]
            busy_s = now_s + train_s
            continue
        while len(running) < concurrent and not outside:
            number, seconds = next(order)
            begun.setdefault(number // size, version)
            left.setdefault(number // size, size)
            heapq.heappush(running, (now_s + seconds, number // size))
        next_s = running[0][0] if running else np.inf
        if busy_s <= next_s:
            now_s, busy_s, version = busy_s, np.inf, version + 1
            continue
        if busy_s == np.inf:
            idle_s += next_s - now_s
        now_s = next_s
        group = heapq.heappop(running)[1]
        left[group] -= 1
        if left[group] == 0:
            outside.append(begun.pop(group))
            del left[group]
    return AsyncReport(
        lags=np.array(lags, dtype=np.int64),
        seconds=now_s,
        versions=versions,
        dropped=0,
        idle_s=idle_s,
    )
