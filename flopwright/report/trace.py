"""The trace both interpreters emit: who did what on which stream, from when to when."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from flopwright.errors import InputError, Violation


class TraceEvent(NamedTuple):
    """One slice.

    Attributes:
        rank: global rank (or pipeline stage where ranks of a stage are alike).
        stream: "compute", "comm" or "copy".
        name: the action as text, e.g. "F(0,3)".
        cls: time class (report/metrics.py TIME_CLASSES).
        start_s, end_s: seconds since the step began.
        nbytes: bytes moved, 0 for compute.
    """

    rank: int
    stream: str
    name: str
    cls: str
    start_s: float
    end_s: float
    nbytes: int = 0


Trace = tuple[TraceEvent, ...]

# The first stream of each kind, and how many a kind has: what runs at once needs its own, for
# a viewer takes slices of one stream that overlap for slices inside each other.
_STREAMS: Final = {"compute": 7, "comm": 20, "copy": 30}
_OTHER_STREAM: Final = 40
_STREAMS_OF_A_KIND: Final = 10
_NANOSECOND: Final = 1e-9


def chrome_trace(events: Iterable[TraceEvent], *, world_size: int) -> dict[str, Any]:
    """Returns the trace as Chrome/Kineto JSON data (Perfetto opens it).

    Events of a rank and kind of stream that overlap stand on streams of their own.
    """
    events = tuple(events)
    streams = _stream_ids(events)
    rows = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": e.name,
            "pid": e.rank,
            "tid": stream,
            "ts": e.start_s * 1e6,
            "dur": (e.end_s - e.start_s) * 1e6,
            "args": {"class": e.cls, "stream": stream, "bytes": e.nbytes},
        }
        for e, stream in zip(events, streams, strict=True)
    ]
    names: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": r, "args": {"name": f"rank {r}"}}
        for r in sorted({e.rank for e in events})
    ]
    kinds = {(e.rank, s): e.stream for e, s in zip(events, streams, strict=True)}
    names += [
        {"ph": "M", "name": "thread_name", "pid": rank, "tid": stream, "args": {"name": kind}}
        for (rank, stream), kind in sorted(kinds.items())
    ]
    return {
        "schemaVersion": 1,
        "distributedInfo": {"rank": 0, "world_size": world_size, "backend": "simulated"},
        "traceEvents": names + rows,
        "displayTimeUnit": "ms",
    }


def kineto_traces(events: Iterable[TraceEvent], *, world_size: int) -> dict[int, dict[str, Any]]:
    """Returns one Kineto trace a rank, as PyTorch's profiler writes them on a GPU.

    Holistic Trace Analysis tells communication and copies by how a kernel's name begins
    ("nccl", "Memcpy"), and wants a file a rank; the plain name stands in the arguments.
    """
    by_rank: dict[int, list[TraceEvent]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    return {
        rank: {
            "schemaVersion": 1,
            "distributedInfo": {"rank": rank, "world_size": world_size, "backend": "nccl"},
            "deviceProperties": [{"id": 0, "name": "simulated"}],
            "traceEvents": [
                _kernel(i, e, stream)
                for i, (e, stream) in enumerate(zip(mine, _stream_ids(mine), strict=True), 1)
            ],
            "displayTimeUnit": "ms",
        }
        for rank, mine in sorted(by_rank.items())
    }


def _stream_ids(events: Sequence[TraceEvent]) -> list[int]:
    """Returns each event's stream: the first of its kind on its rank that is free by then."""
    out = [0] * len(events)
    until: dict[tuple[int, str], list[float]] = {}
    for i in sorted(range(len(events)), key=lambda i: events[i].start_s):
        event = events[i]
        ends = until.setdefault((event.rank, event.stream), [])
        free = (k for k, end in enumerate(ends) if end <= event.start_s + _NANOSECOND)
        lane = next(free, len(ends))
        if lane == len(ends) < _STREAMS_OF_A_KIND:
            ends.append(0.0)
        lane = min(lane, _STREAMS_OF_A_KIND - 1)
        ends[lane] = max(ends[lane], event.end_s)
        out[i] = _STREAMS.get(event.stream, _OTHER_STREAM) + lane
    return out


def _kernel(correlation: int, event: TraceEvent, stream: int) -> dict[str, Any]:
    copies = event.stream == "copy"
    if event.stream == "comm":
        name = f"ncclDevKernel_{event.cls} {event.name}"
    elif copies:
        name = f"Memcpy {'HtoD' if event.name.startswith('FETCH') else 'DtoH'} {event.name}"
    else:
        name = f"{event.cls} {event.name}"
    return {
        "ph": "X",
        "cat": "gpu_memcpy" if copies else "kernel",
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": event.start_s * 1e6,
        "dur": (event.end_s - event.start_s) * 1e6,
        "args": {
            "class": event.cls,
            "action": event.name,
            "stream": stream,
            "device": 0,
            "correlation": correlation,
            "bytes": event.nbytes,
        },
    }


def trace_bytes(data: dict[str, Any], *, zipped: bool) -> bytes:
    """Returns a trace's JSON as bytes, gzipped or not; equal traces give equal bytes."""
    text = json.dumps(data).encode()
    return gzip.compress(text, mtime=0) if zipped else text


def write_chrome_trace(path: Path, events: Iterable[TraceEvent], *, world_size: int) -> None:
    """Writes the trace as JSON, gzipped where the name ends in .gz."""
    data = chrome_trace(tuple(events), world_size=world_size)
    path.write_bytes(trace_bytes(data, zipped=path.suffix == ".gz"))


def read_chrome_trace(path: Path) -> Trace:
    """Returns the events of a trace that `write_chrome_trace` wrote.

    Raises:
        InputError: the file cannot be read, is cut short, or is another program's trace.
    """
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if path.suffix == ".gz" else raw)
        kinds = {
            (e["pid"], e["tid"]): str(e["args"]["name"])
            for e in data["traceEvents"]
            if e["ph"] == "M" and e["name"] == "thread_name"
        }
        return tuple(
            TraceEvent(
                rank=int(e["pid"]),
                stream=kinds[e["pid"], e["tid"]],
                name=str(e["name"]),
                cls=str(e["args"]["class"]),
                start_s=float(e["ts"]) * 1e-6,
                end_s=(float(e["ts"]) + float(e["dur"])) * 1e-6,
                nbytes=int(e["args"]["bytes"]),
            )
            for e in data["traceEvents"]
            if e["ph"] == "X"
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        rule = f"not a trace of a run, or cut short: {error}"
        raise InputError(Violation(file=str(path), rule=rule)) from error
