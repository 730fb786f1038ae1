"""SwiGLU as an op: saves its inputs, not the activation between."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.swiglu import reference


@torch.library.custom_op("flopwright::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Returns silu(gate) * up."""
    if runs_triton("swiglu", gate):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.forward(gate, up)
    return F.silu(gate).mul_(up)


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("flopwright::swiglu_packed", mutates_args=())
def swiglu_packed(gate_up: Tensor) -> Tensor:
    """Returns silu(first half) * second half of the last dimension of a contiguous tensor."""
    if runs_triton("swiglu", gate_up):
        import flopwright.kernels.swiglu.kernel as kernel

        gate, up = gate_up.chunk(2, -1)
        return kernel.forward(gate, up)
    return reference.swiglu_packed(gate_up)


@swiglu_packed.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


def gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up in plain torch."""
    grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
    return grad_gate, F.silu(gate).mul_(grad)


@torch.library.custom_op("flopwright::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up."""
    if runs_triton("swiglu", gate):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.backward(grad, gate, up)
    return gradients(grad, gate, up)


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


@torch.library.custom_op("flopwright::swiglu_packed_backward", mutates_args=())
def swiglu_packed_backward(grad: Tensor, gate_up: Tensor) -> Tensor:
    """Returns the gradient of gate and up, side by side as they came."""
    gate, up = gate_up.chunk(2, -1)
    if runs_triton("swiglu", gate_up):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.backward_packed(grad, gate, up)
    return torch.cat(gradients(grad, gate, up), -1)


@swiglu_packed_backward.register_fake
def _(grad: Tensor, gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = ctx.saved_tensors
    # In plain torch what stands for a moment stands in sight of whoever counts memory.
    if not runs_triton("swiglu", grad):
        return gradients(grad, gate, up)
    found: tuple[Tensor, Tensor] = swiglu_backward(grad, gate, up)
    return found


def _setup_packed(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_packed(ctx: Any, grad: Tensor) -> Tensor:
    (gate_up,) = ctx.saved_tensors
    if not runs_triton("swiglu", grad):
        return torch.cat(gradients(grad, *gate_up.chunk(2, -1)), -1)
    out: Tensor = swiglu_packed_backward(grad, gate_up)
    return out


swiglu.register_autograd(_backward, setup_context=_setup)
swiglu_packed.register_autograd(_backward_packed, setup_context=_setup_packed)
