"""From a trace to exposed time by class: the classes and idle sum to the step."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from flopwright.report.trace import TraceEvent

# What counts when several things happen at once: compute hides communication.
_PRIORITY = (
    "forward",
    "backward",
    "recompute",
    "optimizer",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "pp_comm",
    "dp_comm",
    "offload",
    "host",
)


def exposed_time(events: Iterable[TraceEvent], rank: int, step_time_s: float) -> dict[str, float]:
    """Returns seconds by time class on one rank, "idle" included; they sum to step_time_s.

    A moment in which several events run belongs to the class of highest priority, so that
    communication behind compute is not counted.
    """
    return _exposed([e for e in events if e.rank == rank], step_time_s)


def exposed_by_rank(
    events: Iterable[TraceEvent], step_time_s: float
) -> dict[int, dict[str, float]]:
    """Returns `exposed_time` of every rank that has events, by rank in their order."""
    mine: dict[int, list[TraceEvent]] = {}
    for event in events:
        mine.setdefault(event.rank, []).append(event)
    return {rank: _exposed(mine[rank], step_time_s) for rank in sorted(mine)}


def busy_by_rank(events: Iterable[TraceEvent]) -> dict[int, dict[str, float]]:
    """Returns seconds by time class of every rank, hidden ones included: sums of durations."""
    out: dict[int, dict[str, float]] = {}
    for event in events:
        mine = out.setdefault(event.rank, {})
        mine[event.cls] = mine.get(event.cls, 0.0) + event.end_s - event.start_s
    return {rank: out[rank] for rank in sorted(out)}


def busy_time(exposed: dict[str, float]) -> float:
    """Returns the seconds in which a rank did something: all but "idle"."""
    return sum(seconds for cls, seconds in exposed.items() if cls != "idle")


def _exposed(events: list[TraceEvent], step_time_s: float) -> dict[str, float]:
    mine = [e for e in events if e.end_s > e.start_s]
    edges = sorted(
        {
            0.0,
            step_time_s,
            *(t for e in mine for t in (e.start_s, e.end_s) if 0 <= t <= step_time_s),
        }
    )
    starts = sorted(mine, key=lambda e: e.start_s)
    active: list[TraceEvent] = []
    out: dict[str, float] = {}
    next_event = 0
    for left, right in itertools.pairwise(edges):
        while next_event < len(starts) and starts[next_event].start_s <= left:
            active.append(starts[next_event])
            next_event += 1
        active = [e for e in active if e.end_s > left]
        cls = min((e.cls for e in active), key=_rank_of, default="idle")
        out[cls] = out.get(cls, 0.0) + (right - left)
    return out


def _rank_of(cls: str) -> int:
    return _PRIORITY.index(cls) if cls in _PRIORITY else len(_PRIORITY)
