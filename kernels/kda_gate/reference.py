"""Log-decays of KDA in plain torch, by channel, at most 0.

With r = e^A of a head and u = z + b of a channel:
    unbounded (Kimi Linear, arXiv 2510.26692): g = -r softplus(u)
    bounded below by m < 0 (Kimi K3, arXiv 2607.24653): g = m sigmoid(r u)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def _raised(z: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (u [B, T, H, K], r [H, 1]), at least fp32."""
    dtype, heads = wide_dtype(z.dtype), a_log.numel()
    u = (z.to(dtype) + dt_bias.to(dtype)).view(*z.shape[:-1], heads, -1)
    return u, a_log.to(dtype).exp().view(heads, 1)


def kda_gate(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Returns g [B, T, H, K], at least fp32.

    Args:
        z: [B, T, H * K]; a_log: [H]; dt_bias: [H * K].
        lower_bound: m, or 0 for the unbounded form.
    """
    u, r = _raised(z, a_log, dt_bias)
    return lower_bound * torch.sigmoid(r * u) if lower_bound else -r * F.softplus(u)


def kda_gate_backward(
    grad: Tensor, z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of z, a_log and dt_bias."""
    u, r = _raised(z, a_log, dt_bias)
    if lower_bound:
        s = torch.sigmoid(r * u)
        slope = grad * (lower_bound * s * (1 - s))
        d_u, d_a = slope * r, slope * (r * u)
    else:
        d_u, d_a = grad * (-r * torch.sigmoid(u)), grad * (-r * F.softplus(u))
    return (
        d_u.view(z.shape).to(z.dtype),
        d_a.sum((0, 1, 3)).view(a_log.shape).to(a_log.dtype),
        d_u.sum((0, 1)).view(dt_bias.shape).to(dt_bias.dtype),
    )
