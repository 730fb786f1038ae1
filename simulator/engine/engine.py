"""The event engine: SimPy with seconds as its unit, a fixed order of ties, and a trace hook.

SimPy's queue is ordered by time, priority and insertion, so equal times happen in the order
in which they were asked for: the same processes give the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy

Process = Generator[simpy.Event, Any, None]
Hook = Callable[[str, float, float], None]


class Engine:
    """A run in simulated seconds."""

    def __init__(self, hook: Hook | None = None) -> None:
        self._environment = simpy.Environment()
        self._hook = hook

    @property
    def now_s(self) -> float:
        """Seconds since the run began."""
        return float(self._environment.now)

    def start(self, process: Process) -> simpy.Process:
        """Starts a process; processes started at one time run in the order they were started."""
        return self._environment.process(process)

    def event(self) -> simpy.Event:
        """Returns an event to wait for, which another process makes happen."""
        return self._environment.event()

    def wait(self, seconds: float) -> simpy.Timeout:
        """Returns an event that happens after `seconds`."""
        return self._environment.timeout(seconds)

    def resource(self, capacity: int = 1) -> simpy.Resource:
        """Returns something `capacity` processes can hold at once; first come, first served."""
        return simpy.Resource(self._environment, capacity)

    def all_of(self, events: list[simpy.Event]) -> simpy.Event:
        """Returns an event that happens when every one of `events` has."""
        return simpy.AllOf(self._environment, events)

    def record(self, name: str, start_s: float) -> None:
        """Tells the hook that `name` ran from start_s to now."""
        if self._hook is not None:
            self._hook(name, start_s, self.now_s)

    def run(self) -> None:
        """Runs until nothing is left to happen."""
        self._environment.run()
