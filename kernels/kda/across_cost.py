"""What it costs to carry Kimi Delta Attention's state across ranks (`across.py`)."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.kda.cost import CHUNK
from flopwright.ops import CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES


def wide_name(dtype: str) -> str:
    """Returns the format of states: at least fp32."""
    return "fp64" if dtype == "fp64" else "fp32"


def summary_flops(k_width: int, v_width: int) -> float:
    """Returns the FLOPs of products of one chunk of C tokens on the way to (A, M).

    The pairs of the chunk and its inverse as in `cost.chunk_flops`; of each of the V + K columns
    of the state what it knows of the keys, the inverse's product and the new state.
    """
    c, k, columns = CHUNK, k_width, v_width + k_width
    return 4.0 * c * c * k + 12.0 * c**3 + 4.0 * c * k * columns + 2.0 * c * c * columns


def state_gradient_flops(k_width: int, v_width: int) -> float:
    """Returns the FLOPs of products of one chunk on the way to E.

    The pairs and the inverse again; the results' gradient to the chunk's changes (C x C and
    through the state behind), the inverse's product, and two products into the state before.
    """
    c, k, v = CHUNK, k_width, v_width
    return 4.0 * c * c * k + 12.0 * c**3 + 6.0 * c * k * v + 4.0 * c * c * v


def carried_state(
    cost: CostBuilder, name: str, *, sequences: ArrayLike, runs: ArrayLike, ranks: ArrayLike,
    seq_len: ArrayLike, heads: ArrayLike, k_width: int, v_width: int, dtype: str,
) -> None:  # fmt: skip
    """Adds the rows of both passes and of the chain over all runs, where there are several ranks.

    Args:
        runs: of a rank, `seq_len` tokens each.
    """
    b, r, n, s, h = (np.asarray(x, float) for x in (sequences, runs, ranks, seq_len, heads))
    count, chunks = np.where(n > 1, 1.0, 0.0), b * r * h * np.ceil(s / CHUNK)
    states, wide = b * r * h * k_width, DTYPE_BYTES["fp32"]
    keys = b * r * s * h * (k_width * (DTYPE_BYTES[dtype] + wide) + wide)  # k, g and beta
    others = b * r * s * h * DTYPE_BYTES[dtype]
    state = DTYPE_BYTES[wide_name(dtype)] * states
    links = np.maximum(n * r - 2, 0.0)  # the first run has no state to carry, the last nobody's
    for phase, part, flops, read, written in (
        (Phase.FORWARD, "summary", summary_flops(k_width, v_width), keys + others * v_width,
         state * (v_width + k_width)),
        (Phase.BACKWARD_INPUT, "state_gradient", state_gradient_flops(k_width, v_width),
         keys + others * (k_width + v_width), state * v_width),
    ):  # fmt: skip
        cost.op(
            f"{name}.{part}", OpKind.ATTENTION, phase, dtype=dtype, flops=chunks * flops, m=s,
            n=CHUNK, k=k_width, batch=b * r * h, count=count, read_bytes=read,
            written_bytes=written, kernel="kda",
        )  # fmt: skip
        cost.op(
            f"{name}.carried", OpKind.ATTENTION, phase, dtype=wide_name(dtype), m=k_width,
            n=v_width, k=k_width, batch=b * h, flops=links * b * h * 2.0 * k_width**2 * v_width,
            count=count, read_bytes=n * state * (v_width + k_width),
            written_bytes=state * v_width, kernel="kda",
        )  # fmt: skip
