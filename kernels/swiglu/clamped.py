"""The clamped gate of gpt-oss's experts as an op: saves gate and up, side by side.

With g = min(gate, c) and u = min(max(up, -c), c): (u + 1) g sigmoid(1.702 g).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

_SLOPE: Final = 1.702


def _parts(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = gate_up.chunk(2, -1)
    g = gate.clamp(max=limit)
    return g, up.clamp(-limit, limit), torch.sigmoid(_SLOPE * g)


@torch.library.custom_op("flopwright::clamped_glu_packed", mutates_args=())
def clamped_glu_packed(gate_up: Tensor, limit: float) -> Tensor:
    """Returns the activation of (first half, second half) of the last dimension."""
    g, u, s = _parts(gate_up, limit)
    return (u + 1) * g * s


@clamped_glu_packed.register_fake
def _(gate_up: Tensor, limit: float) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("flopwright::clamped_glu_packed_backward", mutates_args=())
def clamped_glu_packed_backward(grad: Tensor, gate_up: Tensor, limit: float) -> Tensor:
    """Returns the gradient of gate and up, side by side as they came."""
    gate, up = gate_up.chunk(2, -1)
    g, u, s = _parts(gate_up, limit)
    d_gate = grad * (u + 1) * s * (1 + _SLOPE * g * (1 - s)) * (gate <= limit)
    d_up = grad * g * s * (up.abs() <= limit)
    return torch.cat((d_gate, d_up), -1)


@clamped_glu_packed_backward.register_fake
def _(grad: Tensor, gate_up: Tensor, limit: float) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, ctx.limit = inputs
    ctx.save_for_backward(gate_up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (gate_up,) = ctx.saved_tensors
    return clamped_glu_packed_backward(grad, gate_up, ctx.limit), None


clamped_glu_packed.register_autograd(_backward, setup_context=_setup)
