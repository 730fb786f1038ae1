"""What rotary embedding costs: bytes, and nothing kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def rope(cost: CostBuilder, name: str, *, elements: ArrayLike, dtype: str, tag: str = "") -> None:
    """Adds one pass over `elements` values forward and one back (read and write each)."""
    n = np.asarray(elements, float)
    nbytes = n * DTYPE_BYTES[dtype]
    for phase in (Phase.FORWARD, Phase.BACKWARD_INPUT):
        memory_bound(
            cost, name, phase, dtype=dtype, elements=n, read_bytes=nbytes, written_bytes=nbytes,
            tag=tag if phase is Phase.FORWARD else "",
        )  # fmt: skip
