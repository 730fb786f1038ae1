"""The clock of the reference loop."""

from __future__ import annotations

import heapq

import simpy


class Clock(simpy.Environment):  # type: ignore[misc]
    """SimPy with events at absolute times, so that no time is rounded twice."""

    def at(self, time_s: float, priority: int) -> simpy.Event:
        """Returns an event that happens at `time_s`; lower priorities first, 0 is SimPy's own."""
        event = simpy.Event(self)
        event._ok, event._value = True, None
        heapq.heappush(self._queue, (time_s, priority, next(self._eid), event))
        return event
