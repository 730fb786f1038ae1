"""Dense feed-forward block: SwiGLU (arXiv 2002.05202) or GELU."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopwright.kernels.swiglu.op import swiglu
from flopwright.models.projection.module import Projection


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
            inner = swiglu(self.gate_proj(x), self.up_proj(x))
        else:
            inner = F.gelu(self.up_proj(x), approximate="tanh")
        out: Tensor = self.down_proj(inner)
        return out
