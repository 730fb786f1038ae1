"""Links that transfers share: each gets an equal part of what a link carries.

Processor sharing (Kleinrock 1976): a link of capacity c carries c transfers at their full
speed; where n > c are on it, each goes at c / n of it. A transfer over several links goes at
the speed of the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import simpy
from simpy.events import Timeout

Done = Callable[[], None]
# (link, transfers that this one stands for on it)
Path = tuple[tuple[int, float], ...]


class Flow:
    """A transfer on its way: seconds left at full speed, and its speed since `since_s`."""

    __slots__ = ("done", "left_s", "path", "rate", "since_s", "wake")

    def __init__(self, path: Path, seconds: float, done: Done) -> None:
        self.path, self.left_s, self.done = path, seconds, done
        self.rate, self.since_s = 1.0, 0.0
        self.wake: Timeout | None = None


class Network:
    """All links; their loads decide how fast transfers go."""

    def __init__(self, environment: simpy.Environment, capacities: Sequence[float]) -> None:
        self._environment = environment
        self._capacity = list(capacities)
        self._load = [0.0] * len(capacities)
        self._flows: list[dict[Flow, None]] = [{} for _ in capacities]

    def start(self, path: Path, seconds: float, done: Done) -> None:
        """Starts a transfer that takes `seconds` alone; `done` is called at its end."""
        flow = Flow(path, seconds, done)
        changed = False
        for link, weight in path:
            self._load[link] += weight
            self._flows[link][flow] = None
            changed = changed or self._load[link] > self._capacity[link] + 1e-9
        if changed:
            flow.since_s = self._environment.now
            self._adapt(path)
        else:
            self._set_out(flow, 1.0)

    def _set_out(self, flow: Flow, rate: float) -> None:
        """Lets a flow go on at a rate, and wakes it when it will have arrived."""
        flow.rate, flow.since_s = rate, self._environment.now
        wake = Timeout(self._environment, flow.left_s / rate)
        flow.wake = wake
        assert wake.callbacks is not None
        wake.callbacks.append(lambda event: self._arrive(flow, event))

    def _arrive(self, flow: Flow, event: Any) -> None:
        if flow.wake is not event:  # its speed has changed since
            return
        changed = False
        for link, weight in flow.path:
            changed = changed or self._load[link] > self._capacity[link] + 1e-9
            self._load[link] -= weight
            del self._flows[link][flow]
        if changed:
            self._adapt(flow.path)
        flow.done()

    def _adapt(self, path: Path) -> None:
        """Gives every flow on the links of `path` the speed that their loads allow."""
        now = self._environment.now
        flows: dict[Flow, None] = {}
        for link, _ in path:
            flows.update(self._flows[link])
        for flow in flows:
            rate = min(1.0, *(self._capacity[k] / self._load[k] for k, _ in flow.path))
            if rate == flow.rate and flow.wake is not None:
                continue
            flow.left_s = max(0.0, flow.left_s - (now - flow.since_s) * flow.rate)
            self._set_out(flow, rate)
