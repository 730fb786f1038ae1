"""What narrowing to FP8 and back costs: bytes."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES

TILE = 128


def scale_bytes(rows: ArrayLike, width: ArrayLike, blocks: bool = False) -> Array:
    """Returns the bytes of the fp32 scales of tiles of 1 x 128, or of blocks of 128 x 128."""
    tall = np.ceil(np.asarray(rows, float) / TILE) if blocks else np.asarray(rows, float)
    return np.asarray(tall * np.ceil(np.asarray(width, float) / TILE) * DTYPE_BYTES["fp32"])


def quantize(
    cost: CostBuilder, name: str, phase: Phase, *, rows: ArrayLike, width: ArrayLike, dtype: str,
    back: bool = False, blocks: bool = False,
) -> None:  # fmt: skip
    """Adds one pass that reads `dtype` and writes codes and scales, or `back` again."""
    n = np.asarray(rows, float) * np.asarray(width, float)
    narrow, wide = n + scale_bytes(rows, width, blocks), n * DTYPE_BYTES[dtype]
    cost.op(
        name, OpKind.QUANTIZE, phase, dtype=dtype, m=n, kernel="triton",
        read_bytes=narrow if back else wide, written_bytes=wide if back else narrow,
    )  # fmt: skip
