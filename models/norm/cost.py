"""What an RMSNorm layer costs and keeps. Its input is kept by whoever made it the residual."""

from __future__ import annotations

from numpy.typing import ArrayLike

from flopwright.kernels.rms_norm.cost import rms_norm, rstd_bytes
from flopwright.ops import CostBuilder


def norm(cost: CostBuilder, name: str, *, rows: ArrayLike, width: ArrayLike, dtype: str) -> None:
    """Adds the op rows and the kept reciprocals, one a row, both of recompute group "norm"."""
    rms_norm(cost, name, rows=rows, width=width, dtype=dtype, tag="norm")
    cost.saved(f"{name}.rstd", rstd_bytes(rows, dtype), tag="norm")
