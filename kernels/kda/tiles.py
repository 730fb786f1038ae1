"""How Kimi Delta Attention is cut, by target: what compiles with the fewest spills.

Found by compiling candidates (benchmarks/kernel_resources.py), not by timing them.
"""

from __future__ import annotations

from dataclasses import dataclass

from flopwright.kernels.launch import Target


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tokens of a chunk, value columns of a program, warps of the two kernels."""

    chunk: int
    forward: int
    backward: int
    warps: int
    backward_warps: int


def tiles(place: Target) -> Tiles:
    """Returns the tiles: those that compile with the fewest spills."""
    if place.name == "interpreter":
        return Tiles(16, 64, 64, 4, 4)
    if place.amd:
        return Tiles(16, 32, 16, 4, 4)
    if place.name.startswith(("sm_9", "sm_10")):
        return Tiles(16, 32, 16, 4, 8)
    # Products read their operands from registers there: narrower tiles over more warps.
    return Tiles(16, 16, 16, 8, 4)
