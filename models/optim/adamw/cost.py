"""What an AdamW step costs a rank: bytes over the state it owns."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import BlockCost, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES

STATES = 2  # first and second moment


def add_rows(
    cost: CostBuilder, numel: ArrayLike, *, weights: str, gradients: str, master: str | None,
    state: str, name: str = "adamw",
) -> None:  # fmt: skip
    """Adds the element-wise update of `numel` weights to a builder."""
    n = np.asarray(numel, float)
    kept = DTYPE_BYTES[master] if master is not None else 0
    moments = STATES * DTYPE_BYTES[state]
    weight = DTYPE_BYTES[weights]
    cost.op(
        name,
        OpKind.OPTIMIZER,
        Phase.STEP,
        dtype=master or weights,
        m=n,
        read_bytes=n * (DTYPE_BYTES[gradients] + moments + (kept or weight)),
        written_bytes=n * (moments + kept + weight),
    )


def step_cost(
    numel: ArrayLike,
    *,
    weights: str = "bf16",
    gradients: str = "fp32",
    master: str | None = "fp32",
    state: str = "fp32",
    num_candidates: int = 1,
) -> BlockCost:
    """Returns one row: the update of `numel` weights that a rank owns.

    Reads gradient, both moments and the master weight (or the weight), writes the moments,
    the master weight and the weight.

    Args:
        weights, gradients, master, state: dtypes; master None where the weights serve.
    """
    cost = CostBuilder()
    add_rows(cost, numel, weights=weights, gradients=gradients, master=master, state=state)
    return cost.build(num_candidates)
