"""What a dense feed-forward block costs and keeps. Its input is kept by the layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.linear.cost import linear
from flopwright.kernels.memory_bound import memory_bound
from flopwright.kernels.swiglu.cost import swiglu
from flopwright.models.local import Local, add, gather, scatter
from flopwright.ops import CostBuilder, Phase
from flopwright.spec.model import Mlp

TAG = "swiglu"


def feed_forward(
    cost: CostBuilder,
    spec: Mlp,
    hidden: int,
    width: int,
    local: Local,
    prefix: str = "",
    bias: bool = False,
) -> None:
    """Adds the rows of one block of inner width `width`, cut over tp.

    The activation's inputs take FP8 storage; its output is of recompute group "swiglu".
    """
    t, n, dtype = local.tokens, width / local.tp, local.dtype
    inner = t * n
    gather(cost, f"{prefix}up", local, hidden)
    names = ("gate_proj", "up_proj") if spec.gated else ("up_proj",)
    for name in names:
        linear(cost, prefix + name, rows=t, k=hidden, n=n, dtype=dtype, bias=bias)
        cost.saved(f"{prefix}{name}.out", inner * local.width, fp8=True)
    if spec.gated:
        swiglu(cost, f"{prefix}swiglu", rows=t, width=n, dtype=dtype, tag=TAG)
        add(cost, f"{prefix}input_grad_sum", Phase.BACKWARD_INPUT, t * hidden, local)
    else:
        _gelu(cost, prefix + spec.kind, local, inner)
    cost.saved(f"{prefix}inner", inner * local.width, tag=TAG)
    linear(cost, f"{prefix}down_proj", rows=t, k=n, n=hidden, dtype=dtype, bias=bias)
    scatter(cost, f"{prefix}down_proj", local, hidden)


def _gelu(cost: CostBuilder, name: str, local: Local, elements: ArrayLike) -> None:
    n = np.asarray(elements, float)
    nbytes = n * local.width
    memory_bound(
        cost,
        name,
        Phase.FORWARD,
        dtype=local.dtype,
        elements=n,
        read_bytes=nbytes,
        written_bytes=nbytes,
        tag=TAG,
    )
    memory_bound(
        cost,
        name,
        Phase.BACKWARD_INPUT,
        dtype=local.dtype,
        elements=n,
        read_bytes=2 * nbytes,
        written_bytes=nbytes,
    )
