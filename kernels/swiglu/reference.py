"""SwiGLU (arXiv 2002.05202) and SiTU-GLU in plain torch: the oracle of `op.py`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    return F.silu(gate) * up


def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) * second half of the last dimension."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def situ_glu(gate: Tensor, up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
    """Returns b1 tanh(gate / b1) sigmoid(gate) * b2 tanh(up / b2): bounded by b1 * b2.

    Kimi K3's activation, with b1 = 4 and b2 = 25; SwiGLU as both grow.
    """
    bounded = gate_bound * torch.tanh(gate / gate_bound) * torch.sigmoid(gate)
    return bounded * (up_bound * torch.tanh(up / up_bound))


def situ_glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, gate_bound: float, up_bound: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up."""
    s, tg, tu = torch.sigmoid(gate), torch.tanh(gate / gate_bound), torch.tanh(up / up_bound)
    bounded = gate_bound * tg * s
    slope = (1 - tg * tg) * s + bounded * (1 - s)
    return grad * (up_bound * tu) * slope, grad * bounded * (1 - tu * tu)
