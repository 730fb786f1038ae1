"""Output gates in plain torch: x sigmoid(g), and rms_norm(x) w sigmoid(g) by head."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate), both [...] of one shape."""
    dtype = wide_dtype(x.dtype)
    return (x.to(dtype) * torch.sigmoid(gate.to(dtype))).to(x.dtype)


def sigmoid_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and gate."""
    dtype = wide_dtype(x.dtype)
    d, s = grad.to(dtype), torch.sigmoid(gate.to(dtype))
    return (d * s).to(x.dtype), (d * x.to(dtype) * s * (1 - s)).to(gate.dtype)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight * sigmoid(gate) over the last dimension."""
    dtype = wide_dtype(x.dtype)
    wide = x.to(dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
    return (normed * torch.sigmoid(gate.to(dtype))).to(x.dtype)


def gated_norm_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, gate and weight."""
    dtype = wide_dtype(x.dtype)
    wide, w, d = x.to(dtype), weight.to(dtype), grad.to(dtype)
    s = torch.sigmoid(gate.to(dtype))
    rstd = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    unit = wide * rstd
    d_normed = d * s
    d_gate = d_normed * (1 - s) * (unit * w)
    d_weight = (d_normed * unit).flatten(0, -2).sum(0)
    d_unit = d_normed * w
    d_x = rstd * (d_unit - unit * (unit * d_unit).mean(-1, keepdim=True))
    return d_x.to(x.dtype), d_gate.to(gate.dtype), d_weight.to(weight.dtype)
