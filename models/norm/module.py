"""RMSNorm and LayerNorm as layers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from flopwright.kernels.layer_norm.op import layer_norm
from flopwright.kernels.rms_norm.op import rms_norm


class RmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(
        self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like x."""
        y: Tensor
        y, _ = rms_norm(x, self.weight, self.eps)
        return y


class LayerNorm(nn.Module):
    """(x - mean) / deviation * weight + bias over the last dimension."""

    def __init__(
        self, width: int, eps: float, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns a tensor like x."""
        y: Tensor
        y, _, _ = layer_norm(x, self.weight, self.bias, self.eps)
        return y


NORMS: dict[Literal["rms_norm", "layer_norm"], type[RmsNorm] | type[LayerNorm]] = {
    "rms_norm": RmsNorm,
    "layer_norm": LayerNorm,
}
