"""What KDA's log-decays cost: bytes, the results at least fp32."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.rms_norm.cost import wide_bytes
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def kda_gate(
    cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str, tag: str = ""
) -> None:
    """Adds forward (read z, write g) and backward (read z and dg, write dz)."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    z, g = n * DTYPE_BYTES[dtype], n * wide_bytes(dtype)
    memory_bound(
        cost, name, Phase.FORWARD, dtype=dtype, elements=n, read_bytes=z, written_bytes=g, tag=tag
    )
    memory_bound(
        cost, name, Phase.BACKWARD_INPUT, dtype=dtype, elements=n, read_bytes=z + g,
        written_bytes=z,
    )  # fmt: skip
