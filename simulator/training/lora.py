"""Low-rank adapters (arXiv 2106.09685): the model's own weights are read, never trained.

A matrix of the layers (`Workload.lora_targets`; never the router) has an adapter of rank r: two
small products beside it, forward and for both gradients, and one sum of two outputs; the rows
between them are kept. The frozen product makes no weight gradient.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flopwright.models.head.cost import HEAD_AGAIN
from flopwright.ops import Array, BlockCost, CostBuilder, OpKind, OpTable, Phase
from flopwright.simulator.memory.parameters import ParamCounts, adapter_counts
from flopwright.simulator.training.layers import is_transformer_layer
from flopwright.simulator.training.tables import with_lives, with_rows
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import ModelSpec
from flopwright.spec.workload import LoraTargets

_PRODUCTS = frozenset({OpKind.GEMM, OpKind.GROUPED_GEMM})
_NEVER = ("mlp.gate",)  # routers, in whatever format they compute


def with_adapters(
    cost: BlockCost,
    rank: int | None,
    dtype: str,
    layer_kind: str,
    targets: LoraTargets = "all",
) -> BlockCost:
    """Returns a block's cost where only adapters of that rank are trained; None: all is."""
    if rank is None:
        return cost
    ops, more = cost.ops, CostBuilder()
    if is_transformer_layer(layer_kind):
        for row in range(len(ops)):
            if _has_adapter(ops, row, dtype, targets):
                _adapter(more, ops, row, rank, dtype)
    frozen = (ops.phase == Phase.BACKWARD_WEIGHT)[:, None]
    trained = replace(ops, count=np.where(frozen, 0.0, ops.count))
    return replace(cost, ops=with_rows(trained, more), lives=with_lives(cost.lives, more))


def trained_counts(
    spec: ModelSpec,
    layer: int,
    counts: ParamCounts,
    tp: Array,
    ep: Array,
    rank: int | None,
    targets: LoraTargets = "all",
) -> ParamCounts:
    """Returns what a rank holds of a layer and, of it, what is trained: only adapters."""
    if rank is None:
        return counts
    own = adapter_counts(spec, layer, tp, ep, rank, targets=targets)
    return replace(own, held=counts.held + own.held)


def _has_adapter(ops: OpTable, row: int, dtype: str, targets: LoraTargets) -> bool:
    name = ops.name[row]
    forward = Phase(ops.phase[row]) is Phase.FORWARD and OpKind(ops.kind[row]) in _PRODUCTS
    own = not name.startswith(HEAD_AGAIN) and ops.kernel[row] != "unfused"
    own = own and not name.endswith(_NEVER) and ".indexer." not in name
    wanted = targets == "all" or name.startswith("self_attn.")
    if targets == "qkv":
        wanted = wanted and not name.endswith("o_proj")
    return forward and own and wanted and ops.dtype[row] == dtype


def _adapter(more: CostBuilder, ops: OpTable, row: int, rank: int, dtype: str) -> None:
    """Adds the rows of y += (x A) B: [m, k] by [k, rank] by [rank, n]."""
    m, k, n = ops.m[row], ops.k[row], ops.n[row]
    kind, width, name = OpKind(ops.kind[row]), DTYPE_BYTES[dtype], f"{ops.name[row]}.lora"
    groups = ops.batch[row] if kind is OpKind.GROUPED_GEMM else np.ones_like(m)

    def product(phase: Phase, a: Array, b: Array, c: Array) -> None:
        moved = (a * b + b * c) * groups * width
        more.op(
            name, kind, phase, dtype=dtype, flops=2 * a * b * c * groups, m=a, k=b, n=c,
            batch=groups, count=ops.count[row], read_bytes=moved,
            written_bytes=a * c * groups * width,
        )  # fmt: skip

    r = np.full_like(m, float(rank))
    # The rows between its two matrices are kept for the second's gradient.
    more.saved(name, m * r * groups * width * ops.count[row], tag=ops.tag[row])
    product(Phase.FORWARD, m, k, r)
    product(Phase.FORWARD, m, r, n)
    product(Phase.BACKWARD_INPUT, m, n, r)
    product(Phase.BACKWARD_INPUT, m, r, k)
    product(Phase.BACKWARD_WEIGHT, k, m, r)
    product(Phase.BACKWARD_WEIGHT, r, m, n)
    out, into = m * n * groups * width, m * k * groups * width
    for phase, nbytes in ((Phase.FORWARD, out), (Phase.BACKWARD_INPUT, into)):
        more.op(
            f"{name}.sum", OpKind.MEMORY_BOUND, phase, dtype=dtype, m=nbytes / width,
            count=ops.count[row], read_bytes=2 * nbytes, written_bytes=nbytes,
        )  # fmt: skip
