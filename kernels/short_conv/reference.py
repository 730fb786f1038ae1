"""Short causal convolution in plain torch: y_t = silu(sum_j w_j x_{t - W + 1 + j}) a channel.

Heads of queries and keys are then brought to length 1: y / sqrt(sum of y^2 + 1e-6).
B batch, T tokens, C channels, W taps.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype

NORM_EPS: Final = 1e-6


def _padded(x: Tensor, state: Tensor | None, taps: int) -> Tensor:
    """Returns [B, W - 1 + T, C], at least fp32: what stood before x, and x."""
    wide = x.to(wide_dtype(x.dtype))
    if state is None:
        return F.pad(wide, (0, 0, taps - 1, 0))
    return torch.cat((state.to(wide.dtype), wide), 1)


def _convolved(padded: Tensor, weight: Tensor) -> Tensor:
    taps, tokens = weight.shape[-1], padded.shape[1] - weight.shape[-1] + 1
    out = padded[:, :tokens] * weight[:, 0, 0]
    for j in range(1, taps):
        out.addcmul_(padded[:, j : j + tokens], weight[:, 0, j])
    return out


def _heads(x: Tensor, head: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, head)


def _scale(y: Tensor, head: int) -> Tensor:
    """Returns one over the length of each head [B, T, H, 1]."""
    return torch.rsqrt(_heads(y, head).square().sum(-1, keepdim=True) + NORM_EPS)


def short_conv(x: Tensor, weight: Tensor, state: Tensor | None, head: int) -> Tensor:
    """Returns [B, T, C] like x.

    Args:
        x: [B, T, C]; weight: [C, 1, W]; state: the W - 1 inputs before x, None for zeros.
        head: channels of a head that is brought to length 1; 0 leaves them as they are.
    """
    padded = _padded(x, state, weight.shape[-1])
    y = F.silu(_convolved(padded, weight.to(padded.dtype)))
    if head:
        y = (_heads(y, head) * _scale(y, head)).flatten(2)
    return y.to(x.dtype)


def short_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, state: Tensor | None, head: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight and the W - 1 inputs before it."""
    taps, tokens = weight.shape[-1], x.shape[1]
    padded = _padded(x, state, taps)
    kernel, d = weight.to(padded.dtype), grad.to(padded.dtype)
    a = _convolved(padded, kernel)
    s = torch.sigmoid(a)
    if head:
        scale = _scale(a * s, head)
        y, d_heads = _heads(a * s, head) * scale, _heads(d, head)
        d = (scale * (d_heads - y * (y * d_heads).sum(-1, keepdim=True))).flatten(2)
    d = d * s * (1 + a * (1 - s))
    d_padded = torch.zeros_like(padded)
    d_weight = torch.empty_like(kernel)
    for j in range(taps):
        d_padded[:, j : j + tokens].addcmul_(d, kernel[:, 0, j])
        d_weight[:, 0, j] = (d * padded[:, j : j + tokens]).sum((0, 1))
    return (
        d_padded[:, taps - 1 :].to(x.dtype),
        d_weight.to(weight.dtype),
        d_padded[:, : taps - 1].to(x.dtype),
    )
