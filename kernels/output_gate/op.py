"""Output gates as ops: they save their inputs and the weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.output_gate import reference


@torch.library.custom_op("flopwright::sigmoid_gate", mutates_args=())
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Returns x * sigmoid(gate)."""
    return reference.sigmoid_gate(x, gate)


@sigmoid_gate.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("flopwright::sigmoid_gate_backward", mutates_args=())
def sigmoid_gate_backward(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and gate."""
    return reference.sigmoid_gate_backward(grad, x, gate)


@sigmoid_gate_backward.register_fake
def _(grad: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = sigmoid_gate_backward(grad, *ctx.saved_tensors)
    return found


sigmoid_gate.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("flopwright::gated_norm", mutates_args=())
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns x / rms(x) * weight * sigmoid(gate) over the last dimension."""
    return reference.gated_norm(x, gate, weight, eps)


@gated_norm.register_fake
def _(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("flopwright::gated_norm_backward", mutates_args=())
def gated_norm_backward(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of x, gate and weight."""
    return reference.gated_norm_backward(grad, x, gate, weight, eps)


@gated_norm_backward.register_fake
def _(
    grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward_norm(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*gated_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None)


gated_norm.register_autograd(_backward_norm, setup_context=_setup_norm)
