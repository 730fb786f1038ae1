"""What a norm layer costs and keeps. Its input is kept by whoever made it the residual."""

from __future__ import annotations

from typing import Literal

from numpy.typing import ArrayLike

from flopwright.kernels.layer_norm.cost import layer_norm, statistics_bytes
from flopwright.kernels.rms_norm.cost import rms_norm, rstd_bytes
from flopwright.ops import CostBuilder


def norm(
    cost: CostBuilder,
    name: str,
    *,
    rows: ArrayLike,
    width: ArrayLike,
    dtype: str,
    kind: Literal["rms_norm", "layer_norm"] = "rms_norm",
) -> None:
    """Adds the op rows and the kept row statistics, both of recompute group "norm"."""
    if kind == "layer_norm":
        layer_norm(cost, name, rows=rows, width=width, dtype=dtype, tag="norm")
        cost.saved(f"{name}.statistics", statistics_bytes(rows, dtype), tag="norm")
        return
    rms_norm(cost, name, rows=rows, width=width, dtype=dtype, tag="norm")
    cost.saved(f"{name}.rstd", rstd_bytes(rows, dtype), tag="norm")
