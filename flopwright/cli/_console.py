"""The console that tables are printed on."""

from __future__ import annotations

import os

from rich.console import Console


def console_of(width: int) -> Console:
    """Returns a console as wide as the terminal or $COLUMNS; without either, `width` columns."""
    known = Console().is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if known else width)
