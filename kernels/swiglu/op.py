"""SwiGLU as an op: saves its inputs, not the activation between. Plain torch everywhere."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.swiglu import reference


@torch.library.custom_op("flopwright::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    return F.silu(gate).mul_(up)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("flopwright::swiglu_packed", mutates_args=())
def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) * second half of the last dimension of a contiguous tensor."""
    return reference.swiglu_packed(gate_up)


@swiglu_packed.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def _grads(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return grad_gate, F.silu(gate).mul_(grad)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    return _grads(grad, gate, up)


def _setup_packed(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_packed(ctx: Any, grad: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    gate, up = gate_up.chunk(2, -1)
    out: Tensor = torch.cat(_grads(grad, gate, up), -1)
    return out


swiglu.register_autograd(_backward, setup_context=_setup)
swiglu_packed.register_autograd(_backward_packed, setup_context=_setup_packed)
