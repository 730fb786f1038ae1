"""A simulated round as a Chrome trace: phases, instances, attempts, tools, caches.

Perfetto (ui.perfetto.dev) and chrome://tracing open it. Times are microseconds since the
round began. The first process is the loop with its phases; every instance is a process with
the attempts that hold a slot, as many lanes as overlap, its preemptions and evictions as
instants, and counters of running attempts and of tokens of cache; tool calls in sandboxes
have a process of their own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from flopwright.simulator.rollouts.record import RoundRecord
from flopwright.simulator.rollouts.state import KINDS, EventLog

_US: Final = 1e6
_LOOP: Final = 0
_SANDBOXES: Final = 1
_FIRST_INSTANCE: Final = 2
_ENDS: Final = frozenset({"finish", "tool", "chunk", "spent", "preempt", "end"})
_INSTANTS: Final = frozenset({"preempt", "evict"})
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Slice:
    start_s: float
    end_s: float
    attempt: int
    instance: int
    ended: str


def round_trace(record: RoundRecord, *, name: str) -> dict[str, Any]:
    """Returns a round as trace data; its log must have been kept (`simulate_rounds(log=True)`)."""
    log = record.phase.log
    assert log is not None
    running, tools = _slices(log, record.phase.end_s)
    instances = sorted({s.instance for s in running} | {int(i) for i in log.instance if i >= 0})
    events = [*_names(name, instances), *_phases(record)]
    events += _lanes(running, lambda s: _FIRST_INSTANCE + s.instance, "attempt")
    events += _lanes(tools, lambda _: _SANDBOXES, "tool")
    events += _instants(log)
    events += _counters(log, running, tools)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "scenario": name,
            "round_time_s": record.metrics.round_time_s,
            "completed": record.metrics.completed,
            "preemptions": record.metrics.preemptions,
        },
    }


def _names(name: str, instances: list[int]) -> Iterator[Event]:
    titles = {_LOOP: f"loop {name}", _SANDBOXES: "sandboxes"}
    titles |= {_FIRST_INSTANCE + i: f"instance {i}" for i in instances}
    for pid, title in titles.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    yield {"ph": "M", "name": "thread_name", "pid": _LOOP, "tid": 0, "args": {"name": "phases"}}


def _phases(record: RoundRecord) -> Iterator[Event]:
    at = 0.0
    for phase, seconds in record.metrics.time_s.items():
        if seconds > 0:
            yield _slice(phase.replace("_", " "), _LOOP, 0, at, at + seconds, {})
        at += seconds


def _slices(log: EventLog, end_s: float) -> tuple[list[_Slice], list[_Slice]]:
    """Returns when attempts held slots, and when they were in tool calls."""
    running: list[_Slice] = []
    tools: list[_Slice] = []
    open_slot: dict[int, tuple[float, int]] = {}
    open_tool: dict[int, float] = {}
    rows = zip(
        log.time_s.tolist(),
        log.kind.tolist(),
        log.attempt.tolist(),
        log.instance.tolist(),
        strict=True,
    )
    for time_s, kind, attempt, instance in rows:
        what = KINDS[kind]
        if what == "admit":
            open_slot[attempt] = (time_s, instance)
        elif what in _ENDS and attempt in open_slot:
            start_s, where = open_slot.pop(attempt)
            running.append(_Slice(start_s, time_s, attempt, where, what))
        if what == "tool":
            open_tool[attempt] = time_s
        elif what == "return" and attempt in open_tool:
            tools.append(_Slice(open_tool.pop(attempt), time_s, attempt, -1, what))
    for attempt, (start_s, where) in open_slot.items():
        running.append(_Slice(start_s, end_s, attempt, where, "cut"))
    for attempt, start_s in open_tool.items():
        tools.append(_Slice(start_s, end_s, attempt, -1, "cut"))
    return running, tools


def _lanes(slices: list[_Slice], process: Any, what: str) -> Iterator[Event]:
    """Yields slices on lanes that do not overlap: the lowest that is free takes the next."""
    free: dict[int, list[int]] = {}
    busy: dict[int, list[tuple[float, int]]] = {}
    count: dict[int, int] = {}
    for s in sorted(slices, key=lambda s: (s.start_s, s.attempt)):
        pid = process(s)
        mine, idle = busy.setdefault(pid, []), free.setdefault(pid, [])
        while mine and mine[0][0] <= s.start_s:
            heapq.heappush(idle, heapq.heappop(mine)[1])
        if idle:
            lane = heapq.heappop(idle)
        else:
            lane = count[pid] = count.get(pid, 0) + 1
        heapq.heappush(mine, (s.end_s, lane))
        yield _slice(
            f"{what} {s.attempt}", pid, lane, s.start_s, s.end_s,
            {"attempt": s.attempt, "ended": s.ended},
        )  # fmt: skip


def _slice(
    name: str, pid: int, tid: int, start_s: float, end_s: float, args: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_s * _US,
        "dur": max(0.0, end_s - start_s) * _US,
        "args": args,
    }


def _instants(log: EventLog) -> Iterator[Event]:
    for time_s, kind, attempt, instance in zip(
        log.time_s.tolist(), log.kind.tolist(), log.attempt.tolist(), log.instance.tolist(),
        strict=True,
    ):  # fmt: skip
        if KINDS[kind] in _INSTANTS:
            yield {
                "ph": "i",
                "s": "p",
                "name": KINDS[kind],
                "pid": _FIRST_INSTANCE + max(instance, 0),
                "tid": 0,
                "ts": time_s * _US,
                "args": {"attempt": attempt},
            }


def _counters(log: EventLog, running: list[_Slice], tools: list[_Slice]) -> Iterator[Event]:
    last: dict[int, int] = {}
    for time_s, instance, tokens in zip(
        log.time_s.tolist(), log.instance.tolist(), log.kv_tokens.tolist(), strict=True
    ):
        if instance >= 0 and last.get(instance) != tokens:
            last[instance] = tokens
            yield _counter("KV tokens", _FIRST_INSTANCE + instance, time_s, tokens)
    by_instance: dict[int, list[_Slice]] = {}
    for s in running:
        by_instance.setdefault(s.instance, []).append(s)
    for instance, mine in sorted(by_instance.items()):
        yield from _steps("running attempts", _FIRST_INSTANCE + instance, mine)
    yield from _steps("sandboxes in a tool call", _SANDBOXES, tools)


def _steps(name: str, pid: int, slices: Iterable[_Slice]) -> Iterator[Event]:
    changes: dict[float, int] = {}
    for s in slices:
        changes[s.start_s] = changes.get(s.start_s, 0) + 1
        changes[s.end_s] = changes.get(s.end_s, 0) - 1
    level = 0
    for time_s in sorted(changes):
        level += changes[time_s]
        yield _counter(name, pid, time_s, level)


def _counter(name: str, pid: int, time_s: float, value: int) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "ts": time_s * _US, "args": {"value": value}}
