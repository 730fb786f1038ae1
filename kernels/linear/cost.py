"""What a linear layer costs: one product forward, one for each gradient."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.memory_bound import memory_bound
from flopwright.ops import Array, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def linear(
    cost: CostBuilder,
    name: str,
    *,
    rows: ArrayLike,
    k: ArrayLike,
    n: ArrayLike,
    dtype: str,
    tag: str = "",
    compute_dtype: str = "",
    bias: bool = False,
    input_gradient: bool = True,
) -> None:
    """Adds the rows of y[rows, n] = x[rows, k] @ w[n, k]^T; 2 * rows * k * n FLOPs each.

    Args:
        compute_dtype: where the product runs wider than its inputs (a router in fp32).
        bias: adds the sum of the output's gradient over the rows.
        input_gradient: False where nothing before it learns.
    """
    width = DTYPE_BYTES[dtype]
    m, kk, nn = (np.asarray(v, float) for v in (rows, k, n))
    x, w, y = m * kk * width, nn * kk * width, m * nn * width
    flops = 2 * m * kk * nn
    kind, dtype = OpKind.GEMM, compute_dtype or dtype

    def row(phase: Phase, shape: tuple[Array, Array, Array], read: Array, written: Array) -> None:
        cost.op(
            name, kind, phase, dtype=dtype, flops=flops, m=shape[0], k=shape[1], n=shape[2],
            read_bytes=read, written_bytes=written, tag=tag if phase is Phase.FORWARD else "",
        )  # fmt: skip

    row(Phase.FORWARD, (m, kk, nn), x + w, y)
    if input_gradient:
        row(Phase.BACKWARD_INPUT, (m, nn, kk), y + w, x)
    row(Phase.BACKWARD_WEIGHT, (nn, m, kk), y + x, w)
    if bias:
        memory_bound(
            cost, f"{name}.bias", Phase.BACKWARD_WEIGHT, dtype=dtype, elements=nn, read_bytes=y,
            written_bytes=nn * width,
        )  # fmt: skip
