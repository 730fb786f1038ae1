"""At which depths a draft head reads, and how far it is unrolled. No torch."""

from __future__ import annotations

from typing import Final

STEPS: Final = 7  # of the unrolled draft in K3's training (arXiv 2607.24653, 4.1.4)
DEPTHS: Final = 3


def draft_depths(num_layers: int, block: int | None = None) -> tuple[int, int, int]:
    """Returns the layers whose states are read: an early one, one in the middle, the last.

    Args:
        block: layers a block of attention residuals; the first two are then the ends of blocks
            1 and 4, as K3 has it.
    """
    last = num_layers - 1
    if block is not None:
        return min(block - 1, last), min(4 * block - 1, last), last
    return min(1, last), num_layers // 2, last
