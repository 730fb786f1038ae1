"""Why a run ended: what its ranks wrote about it, and which to believe. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from flopwright.executor.launch.request import ERROR_DIR

# One rank's end: rank, time_s, type, message, violations, traceback.
Record = dict[str, Any]

# What gloo and NCCL say when the process at the other end is gone.
_LOST_ANOTHER: Final = ("closed by peer", "reset by peer", "remote process exited")


def read_records(out_dir: Path) -> list[Record]:
    """Returns what the ranks wrote about their ends, in rank order."""
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((out_dir / ERROR_DIR).glob("rank-*.json"))
    ]


def cause(records: Sequence[Record]) -> Record:
    """Returns the record that explains the others: an input error, or the earliest.

    The ranks that fail later do so because the first one is gone.
    """
    invalid = next((r for r in records if r["violations"]), None)
    return invalid or min(records, key=lambda r: (lost_another(r), float(r["time_s"])))


def lost_another(record: Record) -> bool:
    """Returns whether the rank ended because it no longer reached another one."""
    return any(words in record["message"] for words in _LOST_ANOTHER)


def cause_text(record: Record) -> str:
    """Returns the cause in words: every violation of an input error, else rank and error."""
    violations = record["violations"]
    if lost_another(record):
        return (
            f"a rank ended without a word (killed, or out of memory?); rank {record['rank']} "
            f"noticed: {record['message']}"
        )
    if not violations:
        return f"rank {record['rank']} failed: {record['type']}: {record['message']}"
    count = len(violations)
    lines = [f"  {line}" for line in record["message"].splitlines()]
    return "\n".join([f"{count} problem{'s' if count > 1 else ''} with the input:", *lines])
