"""Block sizes of flash attention, by target and width: what compiles without spilling.

Found by compiling candidates (benchmarks/kernel_resources.py), not by timing them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from flopwright.kernels.launch import Target


@dataclass(frozen=True, slots=True)
class Tiles:
    """Queries and keys of a block, and how many warps and stages it runs with."""

    m: int
    n: int
    num_warps: int
    num_stages: int


_INTERPRETED: Final = (Tiles(32, 32, 4, 1),) * 3
_FP32: Final = (Tiles(32, 32, 4, 1), Tiles(16, 32, 4, 1), Tiles(32, 16, 4, 1))
# By family and whether the query width is above 128: forward, gradients of keys, of queries.
_NARROW: Final = {
    ("sm_80", False): (Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 2)),
    ("sm_80", True): (Tiles(128, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(64, 16, 8, 1)),
    ("small", False): (Tiles(128, 32, 8, 2), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
    ("small", True): (Tiles(128, 32, 8, 2), Tiles(32, 32, 4, 1), Tiles(64, 16, 8, 1)),
    ("sm_90", False): (Tiles(128, 64, 8, 3), Tiles(64, 64, 8, 1), Tiles(128, 64, 8, 2)),
    ("sm_90", True): (Tiles(128, 64, 8, 2), Tiles(32, 64, 8, 1), Tiles(64, 64, 8, 1)),
    ("sm_100", False): (Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
    ("sm_100", True): (Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
    ("amd", False): (Tiles(128, 64, 8, 1), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
    ("amd", True): (Tiles(128, 32, 8, 1), Tiles(32, 32, 4, 1), Tiles(64, 32, 8, 1)),
}


def _family(place: Target) -> str:
    if place.amd:
        return "amd"
    if place.shared_bytes < 128 * 1024:
        return "small"
    return "sm_100" if place.name.startswith("sm_10") else place.name


def tiles(dtype: torch.dtype, place: Target, width: int) -> tuple[Tiles, Tiles, Tiles]:
    """Returns the tiles of the forward pass and of the gradients of keys and of queries."""
    if place.name == "interpreter":
        return _INTERPRETED
    if dtype == torch.float32:
        return _FP32
    return _NARROW[_family(place), width > 128]
