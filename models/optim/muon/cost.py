"""What a Muon step costs a rank (arXiv 2502.16982): Newton-Schulz products on whole matrices.

Everything that is not a hidden matrix is AdamW's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flopwright.kernels.newton_schulz import cost as kernel
from flopwright.models.optim.adamw.cost import add_rows
from flopwright.ops import BlockCost, CostBuilder, OpKind, Phase
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.model import GqaAttention, MlaAttention, ModelSpec
from flopwright.spec.parameters import ParamTensor
from flopwright.spec.workload import Precision

ITERATIONS = kernel.ITERATIONS
STATES = 1  # momentum
_WIDE = frozenset({"fp32", "fp64"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrices:
    """Equal matrices whose update one rank computes: `count` (by candidate) of rows x columns."""

    rows: int
    columns: int
    count: ArrayLike = 1


def compute_dtype(precision: Precision) -> str:
    """Returns the format of the iteration: bf16, or what the run computes in where it is wider."""
    return precision.compute if precision.compute in _WIDE else "bf16"


def parts_of(param: ParamTensor) -> int:
    """Returns how many matrices stand above each other in one of a tensor's: gate and up are 2."""
    return 2 if "gate_up_proj" in param.name else 1


def head_parts(spec: ModelSpec, param: ParamTensor) -> int:
    """Returns how many heads' rows stand above each other in a matrix of attention; else 1.

    Per-Head Muon (arXiv 2607.24653) orthogonalises each of them by itself. Of latent attention
    a head's key and value rows are two where they are equally many.
    """
    attn, matrix = spec.attention_of(param.layer), param.name.rsplit(".", 2)[-2]
    if param.role != "attention" or not param.is_matrix:
        return 1
    if isinstance(attn, MlaAttention):
        pair = 2 if attn.qk_nope_head_dim == attn.v_head_dim else 1
        found = {"q_proj": 1, "q_b_proj": 1, "kv_b_proj": pair}
        return attn.num_heads * found[matrix] if matrix in found else 1
    if matrix not in {"q_proj", "k_proj", "v_proj"}:
        return 1
    if isinstance(attn, GqaAttention) and matrix != "q_proj":
        return attn.num_kv_heads
    return attn.num_heads


def matrices_of(param: ParamTensor, parts: int = 0) -> Matrices:
    """Returns the matrices that a tensor holds: an expert's gate and up are two.

    Args:
        parts: matrices above each other in one of the tensor's; 0: `parts_of`.
    """
    assert param.is_matrix
    *stack, rows, columns = param.shape
    packed = parts or parts_of(param)
    count = packed * int(np.prod(stack)) if stack else packed
    return Matrices(rows=rows // packed, columns=columns, count=count)


def newton_schulz_flops(rows: int, columns: int) -> float:
    """Returns 5 * (4 * A^2 * B + 2 * A^3), A <= B: X X^T, its square, and times X."""
    return kernel.newton_schulz_flops(rows, columns)


def _orthogonalise(cost: CostBuilder, group: Matrices, dtype: str) -> None:
    a, b = sorted((group.rows, group.columns))
    width = DTYPE_BYTES[dtype]
    cost.op(
        f"newton_schulz_{group.rows}x{group.columns}",
        OpKind.GEMM,
        Phase.STEP,
        dtype=dtype,
        flops=newton_schulz_flops(a, b),
        read_bytes=ITERATIONS * width * (3.0 * a * b + 3.0 * a * a),
        written_bytes=ITERATIONS * width * (1.0 * a * b + 2.0 * a * a),
        m=a,
        k=b,
        n=a,
        count=group.count,
    )


def step_cost(
    matrices: Iterable[Matrices],
    other_numel: ArrayLike = 0.0,
    *,
    weights: str = "bf16",
    gradients: str = "fp32",
    master: str | None = "fp32",
    state: str = "fp32",
    compute: str = "bf16",
    num_candidates: int = 1,
) -> BlockCost:
    """Returns the rows of one step: Newton-Schulz by shape, momentum and update, AdamW's rest.

    Args:
        matrices: what this rank orthogonalises.
        other_numel: weights it owns that AdamW updates.
        compute: format of the iteration (`compute_dtype`).
    """
    cost = CostBuilder()
    numel: ArrayLike = 0.0
    for group in matrices:
        numel = numel + np.asarray(group.count, float) * group.rows * group.columns
        _orthogonalise(cost, group, compute)
    kept = DTYPE_BYTES[master] if master is not None else 0
    weight, momentum = DTYPE_BYTES[weights], STATES * DTYPE_BYTES[state]
    cost.op(
        "muon",
        OpKind.OPTIMIZER,
        Phase.STEP,
        dtype=master or weights,
        m=numel,
        read_bytes=np.asarray(numel) * (DTYPE_BYTES[gradients] + momentum + (kept or weight)),
        written_bytes=np.asarray(numel) * (momentum + kept + weight),
    )
    add_rows(cost, other_numel, weights=weights, gradients=gradients, master=master, state=state)
    return cost.build(num_candidates)
