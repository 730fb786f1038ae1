"""Matrix products in narrow formats: FP8 by tensor or block, MXFP8, NVFP4, and their casts.

The products of the layers change format; the head, the router and attention do not (the
recipes of Transformer Engine and of arXiv 2412.19437, 3.3). Every product's input and the
gradient of its output are cast once, in both layouts that the three products read; what
several products read is cast once. A weight's cast is once a step and is not priced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from flopwright.models.head.cost import HEAD_AGAIN
from flopwright.ops import BlockCost, CostBuilder, OpKind, OpTable, Phase, TensorLife
from flopwright.simulator.training.layers import is_transformer_layer
from flopwright.simulator.training.tables import with_rows
from flopwright.spec.cluster import DTYPE_BYTES

# Bytes of a number, scales included: none worth counting a tensor, one fp32 for 128, one
# byte for 32, one byte for 16 numbers of four bits.
FORMAT_BYTES: Final = {
    "fp8_tensor": 1.0,
    "fp8_block": 1 + 4 / 128,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
_LAYOUTS: Final = 2  # a product and its gradients read rows and columns
# These read what a product before them has cast.
_SHARES_INPUT: Final = ("k_proj", "v_proj", "kv_a_proj_with_mqa")
# Kept tensors that only products read: kept as they were cast.
_PRODUCT_INPUTS: Final = ("layernorm.out", "inner", "experts.input")


def with_recipe(cost: BlockCost, recipe: str, dtype: str, layer_kind: str) -> BlockCost:
    """Returns a block's cost with its products in the recipe's format.

    Args:
        recipe: Precision.gemm; "same" changes nothing.
        dtype: the compute dtype; rows in others (a router in fp32) stay.
    """
    if recipe == "same" or not is_transformer_layer(layer_kind):
        return cost
    ops, casts = cost.ops, CostBuilder()
    chosen = [row for row in range(len(ops)) if _changes(ops, row, dtype)]
    for row in chosen:
        _cast(casts, ops, row, recipe, dtype)
    narrow = FORMAT_BYTES[recipe] / DTYPE_BYTES[dtype]
    mask = np.zeros(len(ops), bool)
    mask[chosen] = True
    changed = replace(
        ops,
        dtype=tuple(recipe if m else d for m, d in zip(mask, ops.dtype, strict=True)),
        read_bytes=np.where(mask[:, None], ops.read_bytes * narrow, ops.read_bytes),
    )
    return replace(cost, ops=with_rows(changed, casts), lives=_kept(cost.lives, narrow))


def _changes(ops: OpTable, row: int, dtype: str) -> bool:
    product = OpKind(ops.kind[row]) in {OpKind.GEMM, OpKind.GROUPED_GEMM}
    name = ops.name[row]
    own = not name.startswith(HEAD_AGAIN) and ".lora" not in name
    return product and own and ops.dtype[row] == dtype and ops.kernel[row] != "unfused"


def _cast(casts: CostBuilder, ops: OpTable, row: int, recipe: str, dtype: str) -> None:
    """Adds the cast of a row's input (forward) or of its output's gradient (backward)."""
    phase, name = Phase(ops.phase[row]), ops.name[row]
    if phase is Phase.BACKWARD_WEIGHT:
        return
    if phase is Phase.FORWARD and _reads_a_cast(ops, name):
        return
    groups = ops.batch[row] if OpKind(ops.kind[row]) is OpKind.GROUPED_GEMM else 1.0
    numbers = ops.m[row] * ops.k[row] * groups
    casts.op(
        f"{name}.quantize", OpKind.QUANTIZE, phase, dtype=dtype, m=numbers,
        read_bytes=numbers * DTYPE_BYTES[dtype],
        written_bytes=numbers * FORMAT_BYTES[recipe] * _LAYOUTS,
        count=ops.count[row], tag=ops.tag[row],
    )  # fmt: skip


def _reads_a_cast(ops: OpTable, name: str) -> bool:
    stem, _, last = name.rpartition(".")
    gated = last == "up_proj" and f"{stem}.gate_proj" in ops.name
    return gated or last in _SHARES_INPUT


def _kept(lives: TensorLife, narrow: float) -> TensorLife:
    """Returns the kept tensors, those that only products read in the narrow format."""
    cast = np.array([n.endswith(_PRODUCT_INPUTS) for n in lives.name], bool)
    return replace(
        lives,
        fp8=lives.fp8 & ~cast,
        bytes=np.where(cast[:, None], lives.bytes * narrow, lives.bytes),
    )
