"""What GQA costs and keeps. Its input, the normalised state, is kept by the layer."""

from __future__ import annotations

import numpy as np

from flopwright.kernels.linear.cost import linear
from flopwright.kernels.rope.cost import rope
from flopwright.models.core_attention import core_attention
from flopwright.models.local import Local, add, gather, scatter
from flopwright.models.norm.cost import norm
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.model import GqaAttention


def grouped_query_attention(
    cost: CostBuilder, spec: GqaAttention, hidden: int, local: Local, window: int | None = None
) -> None:
    """Adds the rows of one GQA block. Key heads are repeated where tp exceeds their number.

    Args:
        window: positions that a query sees, None for all before it.
    """
    t, dtype, dim = local.tokens, local.dtype, spec.head_dim
    heads = spec.num_heads / local.tp
    kv_heads = np.maximum(spec.num_kv_heads / local.tp, 1.0)
    gather(cost, "qkv", local, hidden)
    for name, count, normed in (
        ("q", heads, spec.qk_norm),
        ("k", kv_heads, spec.qk_norm),
        ("v", kv_heads, False),
    ):
        out, tag = t * count * dim, "norm" if normed else ""
        linear(cost, f"{name}_proj", rows=t, k=hidden, n=count * dim, dtype=dtype, bias=spec.bias)
        if normed:
            cost.saved(f"{name}_proj.out", out * local.width)
            heads_apart = 1.0 if spec.qk_norm_whole else count
            width = dim * count / heads_apart
            norm(cost, f"{name}_norm", rows=t * heads_apart, width=width, dtype=dtype)
        if spec.rope is not None and name != "v":
            rope(cost, f"{name}_rope", elements=out, dtype=dtype, tag=tag)
        cost.saved(name, out * local.width, tag=tag)
    core_attention(
        cost, local, heads=heads, kv_heads=kv_heads, qk_width=dim, v_width=dim, window=window
    )
    linear(cost, "o_proj", rows=t, k=heads * dim, n=hidden, dtype=dtype, bias=spec.o_bias)
    scatter(cost, "o_proj", local, hidden)
    add(cost, "input_grad_sum", Phase.BACKWARD_INPUT, t * hidden, local, 2)
