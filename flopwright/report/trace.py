"""The trace both interpreters emit: who did what on which stream, from when to when."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple


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

_STREAMS: Final = {"compute": 7, "comm": 20, "copy": 30}
_OTHER_STREAM: Final = 40


def chrome_trace(events: Iterable[TraceEvent], *, world_size: int) -> dict[str, Any]:
    """Returns the trace as Chrome/Kineto JSON data (Perfetto opens it)."""
    rows = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": e.name,
            "pid": e.rank,
            "tid": _STREAMS.get(e.stream, _OTHER_STREAM),
            "ts": e.start_s * 1e6,
            "dur": (e.end_s - e.start_s) * 1e6,
            "args": {
                "class": e.cls,
                "stream": _STREAMS.get(e.stream, _OTHER_STREAM),
                "bytes": e.nbytes,
            },
        }
        for e in events
    ]
    names = (
        [
            {"ph": "M", "name": "process_name", "pid": r, "args": {"name": f"rank {r}"}}
            for r in sorted({e.rank for e in events})
        ]
        if rows
        else []
    )
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
            "traceEvents": [_kernel(i, e) for i, e in enumerate(mine, 1)],
            "displayTimeUnit": "ms",
        }
        for rank, mine in sorted(by_rank.items())
    }


def _kernel(correlation: int, event: TraceEvent) -> dict[str, Any]:
    stream = _STREAMS.get(event.stream, _OTHER_STREAM)
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
