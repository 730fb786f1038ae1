"""RMSNorm in plain torch: the oracle of `op.py`, forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (x / rms(x) * weight, 1 / rms(x)); the latter [..., 1 less dim], at least fp32.

    rms(x) = sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467).
    """
    wide = x.to(wide_dtype(x.dtype))
    rstd = torch.rsqrt(wide.square().mean(-1) + eps)
    y = wide * rstd.unsqueeze(-1) * weight.to(wide.dtype)
    return y.to(x.dtype), rstd


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of weight.

    With x' = x * rstd and g = grad * weight: dx = rstd * (g - x' * mean(g * x')),
    dweight = sum over rows of grad * x'.
    """
    dtype = rstd.dtype
    width = x.shape[-1]
    scaled = x.to(dtype) * rstd.unsqueeze(-1)
    wide = grad.to(dtype)
    product = wide * scaled
    grad_weight = product.reshape(-1, width).sum(0)
    mean = (product @ weight.to(dtype)).unsqueeze(-1) / width
    grad_x = (wide * weight.to(dtype)).addcmul_(scaled, mean, value=-1.0).mul_(rstd.unsqueeze(-1))
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype)
