"""A projection: a weight, perhaps a bias, and the linear op."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopwright.kernels.linear.op import linear


class Projection(nn.Module):
    """y = x @ weight^T (+ bias); weights are left unset until `init_weights_`."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        *,
        bias: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width_out, width_in, dtype=dtype, device=device))
        self.bias = (
            nn.Parameter(torch.empty(width_out, dtype=dtype, device=device)) if bias else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Returns [..., width_out]."""
        y: Tensor = linear(x, self.weight, self.bias)
        return y
