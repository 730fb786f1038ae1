"""What a site of attention residuals costs and keeps: its result; its sources stand anyway."""

from __future__ import annotations

from flopwright.kernels.attn_res.cost import attn_res
from flopwright.models.local import Local
from flopwright.ops import CostBuilder


def residual_mixture(
    cost: CostBuilder, name: str, sources: int, hidden: int, local: Local
) -> None:
    """Adds the rows of one site, of recompute group "norm" with the norm behind it."""
    rows = local.shard_tokens
    attn_res(cost, name, rows=rows, width=hidden, sources=sources, dtype=local.dtype, tag="norm")
    cost.saved(f"{name}.out", rows * hidden * local.width, tag="norm")
