"""What a mixture over depth costs: bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def attn_res(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, sources: int, dtype: str,
    tag: str = "",
) -> None:  # fmt: skip
    """Adds forward (read the sources, write one) and backward (read them again, write theirs)."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    x = n * DTYPE_BYTES[dtype]
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=sources * x,
        written_bytes=x, tag=tag,
    )  # fmt: skip
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=sources * n,
        read_bytes=(sources + 1) * x, written_bytes=sources * x,
    )  # fmt: skip
