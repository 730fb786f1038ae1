"""What is said of a run that was told to end and has saved itself. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flopwright.units import plural


def stopped_record(by: str, rank: int, steps: Mapping[str, int]) -> dict[str, Any]:
    """Returns the contents of the folder's record of such an end.

    Args:
        by: the signal's name; rank: the one that was told first.
        steps: that each plan has made, by name.
    """
    return {"by": by, "rank": rank, "steps": dict(steps)}


def stopped_text(record: Mapping[str, Any], out_dir: Path) -> str:
    """Returns the record in words."""
    made = ", ".join(f"plan '{n}' after {plural(k, 'step')}" for n, k in record["steps"].items())
    return (
        f"stopped by {record['by']} (rank {record['rank']} was told first): {made}, saved in "
        f"{out_dir}; --resume goes on from there"
    )
