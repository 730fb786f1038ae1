"""A trace as bytes for the store: gzipped JSON, a row an event."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence

from flopwright.errors import InputError, Violation
from flopwright.report.trace import Trace, TraceEvent

# Larger steps are not kept: rows of a few megabytes are what a database is for.
MAX_EVENTS = 200_000


def packed(trace: Sequence[TraceEvent]) -> bytes:
    """Returns the events as bytes; equal traces give equal bytes."""
    return gzip.compress(json.dumps([list(e) for e in trace]).encode(), mtime=0)


def unpacked(data: bytes, where: str) -> Trace:
    """Returns the events of `packed`.

    Raises:
        InputError: the bytes are none.
    """
    try:
        return tuple(TraceEvent(*row) for row in json.loads(gzip.decompress(data)))
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise InputError(
            Violation(field=where, rule=f"the stored trace cannot be read: {error}")
        ) from error
