"""Colours of the charts: each is seen on a light and on a dark page (contrast of 3 and more)."""

from __future__ import annotations

from typing import Final

from flopwright.report import compare_style

# Lines and marks that are neither good nor bad.
INK: Final = "#7f7f7f"
LIMIT: Final = "#d6403a"
BLUE: Final = "#3a83b8"
RED: Final = "#d1495b"
GREY: Final = "#9a9a9a"
GREEN: Final = "#4f9a58"
PURPLE: Final = "#8f6cc0"
YELLOW: Final = "#d99a1c"
BAND: Final = "rgba(58,131,184,0.14)"
# The comparison's own colours are for white paper: the darkest are raised.
TIME_COLOURS: Final = compare_style.TIME_COLOURS | {
    "recompute": "#b0406f",
    "pp_comm": "#2f78ad",
    "dp_comm": "#6a74d0",
}
MEMORY_COLOURS: Final = compare_style.MEMORY_COLOURS | {"weights": "#2f78ad"}
