"""Colours and labels that the comparison's PNG and HTML share."""

from __future__ import annotations

from typing import Final

# One hue a family: compute warm, communication blue, waiting grey.
TIME_COLOURS: Final = {
    "forward": "#f2b134",
    "backward": "#d1495b",
    "recompute": "#8f2d56",
    "optimizer": "#5b8c5a",
    "tp_comm": "#9bc4e2",
    "cp_comm": "#6fb0dc",
    "ep_comm": "#4a90c2",
    "pp_comm": "#1f5f8b",
    "dp_comm": "#123a5a",
    "offload": "#7d6b91",
    "host": "#a8957a",
    "idle": "#c9c9c9",
}
MEMORY_COLOURS: Final = {
    "weights": "#1f5f8b",
    "gradients": "#4a90c2",
    "optimizer_state": "#9bc4e2",
    "activations": "#d1495b",
    "temporaries": "#f2b134",
    "reserved": "#c9c9c9",
}
BEFORE: Final = "#9a9a9a"
AFTER: Final = "#d1495b"
HELD_OUT: Final = "#1f5f8b"
BANDS: Final = (0.2, 0.1)


def label(name: str) -> str:
    """Returns a class name for people: "ep_comm" is "EP comm"."""
    head, _, rest = name.partition("_")
    if rest == "comm":
        return f"{head.upper()} comm"
    return name.replace("_", " ")


def time_scale(longest_s: float) -> tuple[float, str]:
    """Returns (factor, unit) in which a chart shows times up to `longest_s`."""
    return (1.0, "s") if longest_s >= 2 else (1e3, "ms")


def bytes_scale(largest_bytes: float) -> tuple[float, str]:
    """Returns (factor, unit) in which a chart shows sizes up to `largest_bytes`."""
    return (2.0**-30, "GiB") if largest_bytes >= 2**30 else (2.0**-20, "MiB")
