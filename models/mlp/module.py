"""Dense feed-forward block: SwiGLU (arXiv 2002.05202) or GELU."""

from __future__ import annotations

from typing import Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwright.kernels.swiglu.op import swiglu
from flopwright.models.projection.module import Projection
from flopwright.models.saving import narrow, region

# Recompute groups of the activation between the matrices.
ACTIVATION: Final = ("swiglu", "act")


class FeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), or down(gelu(up(x))) with the tanh form of GELU."""

    def __init__(
        self,
        kind: Literal["swiglu", "gelu"],
        hidden: int,
        width: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.kind = kind
        if kind == "swiglu":
            self.gate_proj = Projection(hidden, width, bias=bias, dtype=dtype, device=device)
        self.up_proj = Projection(hidden, width, bias=bias, dtype=dtype, device=device)
        self.down_proj = Projection(width, hidden, bias=bias, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like x."""
        if self.kind == "swiglu":
            gate, up = narrow(self.gate_proj(x)), narrow(self.up_proj(x))
            inner = region(ACTIVATION, swiglu, gate, up)
        else:
            inner = region(ACTIVATION, _gelu, narrow(self.up_proj(x)))
        out: Tensor = self.down_proj(inner)
        return out


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")
