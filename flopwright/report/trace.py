"""The trace both interpreters emit: who did what on which stream, from when to when."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple


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


def chrome_trace(events: Iterable[TraceEvent], *, world_size: int) -> dict[str, Any]:
    """Returns the trace as Chrome/Kineto JSON data (Perfetto opens it)."""
    streams = {"compute": 7, "comm": 20, "copy": 30}
    rows = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": e.name,
            "pid": e.rank,
            "tid": streams.get(e.stream, 40),
            "ts": e.start_s * 1e6,
            "dur": (e.end_s - e.start_s) * 1e6,
            "args": {"class": e.cls, "stream": streams.get(e.stream, 40), "bytes": e.nbytes},
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


def write_chrome_trace(path: Path, events: Iterable[TraceEvent], *, world_size: int) -> None:
    """Writes the trace as JSON, gzipped where the name ends in .gz."""
    text = json.dumps(chrome_trace(tuple(events), world_size=world_size))
    if path.suffix == ".gz":
        # mtime=0: the same plan gives the same bytes
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text)
