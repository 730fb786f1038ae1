"""Which of a kernel class's curves an operator row asks for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from flopwright.ops import OpKind, OpTable, Phase

KIND_NAMES: Final = {
    OpKind.GEMM: "gemm",
    OpKind.GROUPED_GEMM: "grouped_gemm",
    OpKind.ATTENTION: "attention",
    OpKind.MEMORY_BOUND: "memory_bound",
    OpKind.OPTIMIZER: "optimizer",
    OpKind.QUANTIZE: "quantize",
}
# Recipes that multiply in the same format under another name.
SAME_FORMAT: Final = {"fp8_tensor": "fp8"}
# The format whose peak a recipe works against.
PEAK_OF: Final = {"fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4", "mxfp4": "fp4"}

_BACKWARD: Final = frozenset({Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT})
# First match on the operator's name; families without a curve take the class's own.
_FAMILIES: Final = (
    ("permute", "permute"),
    ("norm", "norm"),
    ("rope", "rope"),
    ("rotary", "rope"),
    ("swiglu", "activation"),
    ("act", "activation"),
    ("cross_entropy", "loss"),
    ("loss", "loss"),
    ("embed", "embedding"),
    ("route", "router"),
)
# Causal attention executes half of the pairs, windows fewer.
_CAUSAL_BELOW: Final = 0.7


@dataclass(frozen=True, slots=True)
class Variant:
    """What decides between curves of one kernel class.

    Attributes:
        kind, dtype, phase: as EfficiencyCurve has them.
        head_dim: query width of attention, else 0.
        causal: False where attention sees (nearly) every pair.
        family: of memory-bound operators, else "".
    """

    kind: str
    dtype: str
    phase: str = "forward"
    head_dim: int = 0
    causal: bool = True
    family: str = ""


@lru_cache(maxsize=4096)
def family_of(name: str) -> str:
    """Returns the family of memory-bound operators that a row's name says, "" for none."""
    last = name.rsplit(".", 1)[-1]
    return next((family for part, family in _FAMILIES if part in last), "")


def variant_of(ops: OpTable, row: int) -> Variant:
    """Returns the variant of a row; one row has one for all candidates."""
    kind = KIND_NAMES[OpKind(ops.kind[row])]
    dtype = SAME_FORMAT.get(ops.dtype[row], ops.dtype[row])
    phase = "backward" if Phase(ops.phase[row]) in _BACKWARD else "forward"
    if kind == "attention":
        if "kda" in ops.kernel[row] or "kda" in ops.name[row]:
            return Variant("kda", dtype, phase)
        head = int(ops.k[row].max(initial=0))
        return Variant(kind, dtype, phase, head_dim=head, causal=_causal(ops, row))
    if kind == "memory_bound":
        return Variant(kind, dtype, phase, family=family_of(ops.name[row]))
    return Variant(kind, dtype, phase)


def _causal(ops: OpTable, row: int) -> bool:
    """Returns whether a row executes clearly fewer pairs than there are.

    All pairs cost 4 FLOPs a unit of head width forward and 10 backward; where values are
    narrower than keys somewhat less.
    """
    per_pair = 4.0 if Phase(ops.phase[row]) is Phase.FORWARD else 10.0
    pairs = ops.batch[row] * ops.m[row] * ops.n[row]
    full = float(np.sum(per_pair * pairs * ops.k[row]))
    return full <= 0 or float(np.sum(ops.flops[row])) < _CAUSAL_BELOW * full
