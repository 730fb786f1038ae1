"""SiTU-GLU of gate and up side by side, as experts have them: saves the one tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_triton
from flopwright.kernels.swiglu import reference


@torch.library.custom_op("flopwright::situ_glu_packed", mutates_args=())
def situ_glu_packed(gate_up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
    """Returns the activation of (first half, second half) of the last dimension."""
    gate, up = gate_up.chunk(2, -1)
    if runs_triton("situ_glu", gate_up):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.forward(gate, up, (gate_bound, up_bound))
    return reference.situ_glu(gate, up, gate_bound, up_bound)


@situ_glu_packed.register_fake
def _(gate_up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
    return gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2))


@torch.library.custom_op("flopwright::situ_glu_packed_backward", mutates_args=())
def situ_glu_packed_backward(
    grad: Tensor, gate_up: Tensor, gate_bound: float, up_bound: float
) -> Tensor:
    """Returns the gradient of gate and up, side by side as they came."""
    gate, up = gate_up.chunk(2, -1)
    if runs_triton("situ_glu", gate_up):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.backward_packed(grad, gate, up, (gate_bound, up_bound))
    return torch.cat(reference.situ_glu_backward(grad, gate, up, gate_bound, up_bound), -1)


@situ_glu_packed_backward.register_fake
def _(grad: Tensor, gate_up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
    return gate_up.new_empty(gate_up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate_up, *ctx.bounds = inputs
    ctx.save_for_backward(gate_up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (gate_up,) = ctx.saved_tensors
    return situ_glu_packed_backward(grad, gate_up, *ctx.bounds), None, None


situ_glu_packed.register_autograd(_backward, setup_context=_setup)
