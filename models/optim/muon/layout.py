"""Which tensors of a model Muon orthogonalises, and what whole matrices a rank's parts are of."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from flopwright.models.optim.muon.cost import head_parts, parts_of
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import cuts
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import ParamTensor, parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixLayout:
    """How a rank's tensor [..., rows, columns] is made of matrices.

    Attributes:
        parts: matrices that stand above each other in its rows (gate and up of an expert).
        axis: the group whose ranks each hold a slice of every matrix; "" where they are whole.
        dim: what is cut: 0 rows, 1 columns.
    """

    parts: int = 1
    axis: Literal["", "tp", "etp"] = ""
    dim: int = 0


def matrix_layouts(
    spec: ModelSpec, plan: ParallelPlan, *, per_head: bool = False
) -> dict[str, MatrixLayout]:
    """Returns the layout of each tensor that Muon orthogonalises, by name (`is_matrix`).

    Args:
        per_head: each head's rows of queries, keys and values are matrices of their own.
    """
    return {
        p.name: _layout(p, plan, head_parts(spec, p) if per_head else 1)
        for p in parameters(spec)
        if p.is_matrix and p.trainable
    }


def _layout(param: ParamTensor, plan: ParallelPlan, heads: int) -> MatrixLayout:
    if heads > 1:  # a tensor-parallel rank holds whole ones
        return MatrixLayout(parts=heads // math.prod(plan.tp for _ in cuts(param, plan)))
    inside = [c for c in cuts(param, plan) if c.axis != "ep"]  # whole experts stay matrices
    if not inside:
        return MatrixLayout(parts=parts_of(param))
    (cut,) = inside
    assert cut.axis != "ep"
    stack = len(param.shape) - 2
    return MatrixLayout(parts=parts_of(param), axis=cut.axis, dim=cut.dim - stack)
