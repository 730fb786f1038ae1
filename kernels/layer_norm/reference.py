"""LayerNorm (arXiv 1607.06450) in plain torch: the oracle of `op.py`."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ((x - mean) / std * weight + bias, mean, 1 / std) over the last dimension.

    std = sqrt(mean((x - mean)^2) + eps); mean and 1 / std are [..., 1], at least fp32.
    """
    wide = x.to(wide_dtype(x.dtype))
    mean = wide.mean(-1, keepdim=True)
    rstd = torch.rsqrt((wide - mean).square().mean(-1, keepdim=True) + eps)
    y = (wide - mean) * rstd * weight.to(wide.dtype) + bias.to(wide.dtype)
    return y.to(x.dtype), mean, rstd
