"""Why a run ended: what its ranks wrote about it, and which to believe. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwright.executor.launch.request import ERROR_DIR

# One rank's end: rank, time_s, type, message, violations, traceback.
Record = dict[str, Any]


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
    return invalid or min(records, key=lambda r: float(r["time_s"]))


def cause_text(record: Record) -> str:
    """Returns the cause in words: every violation of an input error, else rank and error."""
    violations = record["violations"]
    if not violations:
        return f"rank {record['rank']} failed: {record['type']}: {record['message']}"
    count = len(violations)
    lines = [f"  {line}" for line in record["message"].splitlines()]
    return "\n".join([f"{count} problem{'s' if count > 1 else ''} with the input:", *lines])
