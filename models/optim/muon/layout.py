"""Which tensors of a model Muon orthogonalises, and what whole matrices a rank's parts are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flopwright.models.optim.muon.cost import parts_of
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.sharding import tensor_split
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import ParamTensor, parameters

_COLUMNS_CUT = ("o_proj.weight", "down_proj.weight", "down_proj")


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


def matrix_layouts(spec: ModelSpec, plan: ParallelPlan) -> dict[str, MatrixLayout]:
    """Returns the layout of each tensor that Muon orthogonalises, by name (`is_matrix`)."""
    return {
        p.name: MatrixLayout(
            parts=parts_of(p), axis=_axis(p, plan), dim=int(p.name.endswith(_COLUMNS_CUT))
        )
        for p in parameters(spec)
        if p.is_matrix and p.trainable
    }


def _axis(param: ParamTensor, plan: ParallelPlan) -> Literal["", "tp", "etp"]:
    if param.role == "expert":
        return "etp" if plan.etp > 1 else ""
    return "tp" if tensor_split(param, plan) > 1 else ""
