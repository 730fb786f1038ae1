"""What joins the hidden state and the next token's embedding before a prediction module's layer.

Both are normalised and projected from [2 hidden] to [hidden] (arXiv 2412.19437, 2.2). The
embedding table and the head are the model's own.
"""

from __future__ import annotations

from flopwright.kernels.linear.cost import linear
from flopwright.models.local import Local
from flopwright.models.norm.cost import norm
from flopwright.ops import CostBuilder
from flopwright.spec.model import ModelSpec


def prediction_inputs(cost: CostBuilder, spec: ModelSpec, local: Local) -> None:
    """Adds the rows of the two norms and the projection; each rank has its tokens / tp."""
    rows, hidden, dtype = local.shard_tokens, spec.hidden_size, local.dtype
    state = rows * hidden * local.width
    for name in ("hnorm", "enorm"):
        cost.saved(f"{name}.input", state)
        norm(cost, name, rows=rows, width=hidden, dtype=dtype, kind=spec.norm)
        cost.saved(f"{name}.out", state, tag="norm")
    linear(cost, "eh_proj", rows=rows, k=2 * hidden, n=hidden, dtype=dtype)
