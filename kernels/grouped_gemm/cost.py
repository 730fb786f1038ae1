"""What one matrix product an expert costs, at balanced load."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def grouped_gemm(
    cost: CostBuilder,
    name: str,
    *,
    rows: ArrayLike,
    experts: ArrayLike,
    k: ArrayLike,
    n: ArrayLike,
    dtype: str,
    tag: str = "",
) -> None:
    """Adds y[rows, n] = x[rows, k] times each row's expert [n, k]^T, and both gradients.

    m is the rows of one expert, batch the local experts; 2 * rows * k * n FLOPs each.
    """
    r, e, k, n = (np.asarray(v, float) for v in (rows, experts, k, n))
    width = DTYPE_BYTES[dtype]
    x, w, y = r * k * width, e * n * k * width, r * n * width
    flops, one = 2 * r * k * n, r / e

    def row(phase: Phase, shape: tuple[ArrayLike, ...], read: Array, written: Array) -> None:
        cost.op(
            name, OpKind.GROUPED_GEMM, phase, dtype=dtype, flops=flops, m=shape[0], k=shape[1],
            n=shape[2], batch=e, read_bytes=read, written_bytes=written,
            tag=tag if phase is Phase.FORWARD else "",
        )  # fmt: skip

    row(Phase.FORWARD, (one, k, n), x + w, y)
    row(Phase.BACKWARD_INPUT, (one, n, k), y + w, x)
    row(Phase.BACKWARD_WEIGHT, (n, one, k), y + x, w)
