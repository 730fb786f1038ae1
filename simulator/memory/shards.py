"""Over how many ranks ZeRO cuts what a rank would otherwise hold whole."""

from __future__ import annotations

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.training.candidates import Candidates


def zero_shards(candidates: Candidates) -> tuple[Array, Array]:
    """Returns (dense, expert): ranks that share one copy of the optimizer state.

    Dense numbers are cut over dp_shard and context-parallel ranks, an expert's over those of
    them that hold the same parts of the same experts; dp_replicate groups each have a copy.
    """
    dense = candidates.dp_shard * candidates.cp
    expert = np.maximum(dense * candidates.tp // (candidates.ep * candidates.etp), 1)
    return dense.astype(float), expert.astype(float)
