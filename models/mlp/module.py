"""Dense feed-forward block: SwiGLU (arXiv 2002.05202), SiTU-GLU (arXiv 2607.24653) or GELU."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwright.kernels.relu2.op import relu2
from flopwright.models.gates import gated
from flopwright.models.parallel import TensorParallel, WholeMatrices
from flopwright.models.projection.module import Projection, RowProjection, columns
from flopwright.models.saving import narrow, region
from flopwright.spec.model import Mlp

# Recompute groups of the activation between the matrices.
ACTIVATION: Final = ("swiglu", "act")


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), the same with SiTU-GLU, or down(f(up(x))).

    f is the tanh form of GELU, or the square of relu.

    Tensor-parallel ranks cut `width` between them; `name` says in traces what travels.
    """

    def __init__(
        self,
        spec: Mlp,
        hidden: int,
        width: int,
        *,
        bias: bool = False,
        tensor: TensorParallel | None = None,
        name: str = "mlp",
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.spec, self.name, self.tensor = spec, name, tensor or WholeMatrices()
        width //= self.tensor.size
        if spec.gated:
            self.gate_proj = Projection(hidden, width, bias=bias, dtype=dtype, device=device)
        self.up_proj = Projection(hidden, width, bias=bias, dtype=dtype, device=device)
        self.down_proj = RowProjection(
            width, hidden, self.tensor, f"{name}.down_proj", bias=bias, dtype=dtype, device=device
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like x."""
        if self.spec.gated:
            gate, up = self._raised(x, self.gate_proj, self.up_proj)
            inner = gated(ACTIVATION, gate, up, self.spec.bounds)
        else:
            (up,) = self._raised(x, self.up_proj)
            plain = _gelu if self.spec.kind == "gelu" else relu2
            inner = region(ACTIVATION, plain, narrow(up))
        out: Tensor = self.down_proj(inner)
        return out

    def _raised(self, x: Tensor, *projections: Projection) -> tuple[Tensor, ...]:
        return columns(self.tensor, x, projections, f"{self.name}.up")


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
