"""RMSNorm and LayerNorm as layers."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from flopwright.kernels.layer_norm.op import layer_norm
from flopwright.kernels.rms_norm.op import add_rms_norm, rms_norm
from flopwright.models.saving import drops, region


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


def added_and_normed(x: Tensor, more: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Returns (x + more, the norm of that), in one op where the norm's result is kept."""
    if isinstance(norm, RmsNorm) and not drops("norm"):
        normed, total = add_rms_norm(more, x, norm.weight, norm.eps)
        return total, normed
    total = x + more
    return total, region("norm", norm, total)


NORMS: dict[Literal["rms_norm", "layer_norm"], type[RmsNorm] | type[LayerNorm]] = {
    "rms_norm": RmsNorm,
    "layer_norm": LayerNorm,
}
