"""Log-decays as an op: saves the logits and the two vectors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.kda_gate import reference
from flopwright.kernels.linear.reference import wide_dtype


@torch.library.custom_op("flopwright::kda_gate", mutates_args=())
def kda_gate(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    """Returns the log-decays [B, T, H, K]; see `reference.kda_gate`."""
    return reference.kda_gate(z, a_log, dt_bias, lower_bound)


@kda_gate.register_fake
def _(z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float) -> Tensor:
    heads = a_log.numel()
    shape = (*z.shape[:-1], heads, z.shape[-1] // heads)
    return z.new_empty(shape, dtype=wide_dtype(z.dtype))


@torch.library.custom_op("flopwright::kda_gate_backward", mutates_args=())
def kda_gate_backward(
    grad: Tensor, z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of z, a_log and dt_bias."""
    return reference.kda_gate_backward(grad, z, a_log, dt_bias, lower_bound)


@kda_gate_backward.register_fake
def _(
    grad: Tensor, z: Tensor, a_log: Tensor, dt_bias: Tensor, lower_bound: float
) -> tuple[Tensor, Tensor, Tensor]:
    found = [x.new_empty(x.shape) for x in (z, a_log, dt_bias)]
    return found[0], found[1], found[2]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.lower_bound = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
    return (*kda_gate_backward(grad, *ctx.saved_tensors, ctx.lower_bound), None)


kda_gate.register_autograd(_backward, setup_context=_setup)
