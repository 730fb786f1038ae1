"""Kernel classes: what a software stack's factors scale, and how operator rows fall into them."""

from __future__ import annotations

from typing import Final

import numpy as np

from flopwright.models.head.cost import HEAD_AGAIN
from flopwright.ops import Array, OpKind, OpTable, Phase
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.layers import HEAD

KERNELS: Final = (
    "gemm",
    "grouped_gemm",
    "attention",
    "attention_backward",
    "memory_bound",
    "quantize",
    "head",
)
# Entries of kernel_factors that go with a product's shape, beside its class.
UNALIGNED: Final = "unaligned"
ODD: Final = "odd"
# Sides of the tiles that tensor cores are fed with: whole tiles of 64, and vectors of 8.
_TILE: Final = 64
_VECTOR: Final = 8
_OF_KIND: Final = {
    OpKind.GEMM: "gemm",
    OpKind.GROUPED_GEMM: "grouped_gemm",
    OpKind.MEMORY_BOUND: "memory_bound",
    OpKind.QUANTIZE: "quantize",
}
_PRODUCTS: Final = frozenset({OpKind.GEMM, OpKind.GROUPED_GEMM})
_HEAD_ROWS: Final = ("lm_head", "loss")


def kernel_class(ops: OpTable, row: int, layer_kind: str) -> str:
    """Returns the kernel class of a row: the head's product and loss are one of their own."""
    kind, name = OpKind(ops.kind[row]), ops.name[row]
    if layer_kind == HEAD or name.startswith(HEAD_AGAIN):
        if name.removeprefix(HEAD_AGAIN).split(".")[0] in _HEAD_ROWS:
            return "head"
    elif kind is OpKind.ATTENTION or ops.kernel[row] == "unfused":
        return "attention" if Phase(ops.phase[row]) is Phase.FORWARD else "attention_backward"
    return _OF_KIND[kind]


def kernel_classes(ops: OpTable, layer_kind: str) -> tuple[str, ...]:
    """Returns the kernel class of every row."""
    return tuple(kernel_class(ops, row, layer_kind) for row in range(len(ops)))


def scaled_seconds(
    seconds: Array, ops: OpTable, classes: tuple[str, ...], calibration: Calibration
) -> Array:
    """Returns the rows' seconds times the factors of their class and of their alignment."""
    factors = calibration.kernel_factors
    if not factors:
        return seconds
    by_class = np.array([factors.get(c, 1.0) for c in classes])
    return np.asarray(seconds * by_class[:, None] * alignment_factor(ops, calibration))


def alignment_factor(ops: OpTable, calibration: Calibration) -> Array:
    """Returns what shapes that do not fill tiles cost, (rows, candidates).

    The sides of a product's weight count (of its gradient in the weight's backward), not the
    tokens: "unaligned" where one is no multiple of 64, "odd" where one is none of 8.
    """
    factors = calibration.kernel_factors
    unaligned, odd = factors.get(UNALIGNED, 1.0), factors.get(ODD, 1.0)
    out = np.ones(ops.m.shape)
    if unaligned == odd == 1.0:
        return out
    products = np.isin(ops.kind, list(_PRODUCTS))
    products &= np.array([k != "unfused" and ".lora" not in n for k, n in _names(ops)], bool)
    weight = (ops.phase == Phase.BACKWARD_WEIGHT)[:, None]
    first, second = np.where(weight, ops.m, ops.k), ops.n
    for size, factor in ((_TILE, unaligned), (_VECTOR, odd)):
        broken = (first % size != 0) | (second % size != 0)
        out = np.where(products[:, None] & broken, factor, out)
    return out


def _names(ops: OpTable) -> zip[tuple[str, str]]:
    return zip(ops.kernel, ops.name, strict=True)
