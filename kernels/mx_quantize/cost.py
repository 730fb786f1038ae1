"""What fake quantisation costs: one pass forward, nothing back and nothing kept."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def mx_fake_quantize(cost: CostBuilder, name: str, *, elements: ArrayLike, dtype: str) -> None:
    """Adds the pass that reads and writes `elements` numbers."""
    n = np.asarray(elements, float)
    nbytes = n * DTYPE_BYTES[dtype]
    cost.op(
        name, OpKind.QUANTIZE, Phase.FORWARD, dtype=dtype, m=n, read_bytes=nbytes,
        written_bytes=nbytes, kernel="triton",
    )  # fmt: skip
