"""SiTU-GLU as an op, and both activations with their inputs kept in FP8.

`situ_glu` saves its inputs; `gated_fp8` saves codes and scales of tiles of 1 x 128 in their
place, made in the pass that makes the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import runs_e4m3, runs_triton
from flopwright.kernels.fp8_quantize import reference as fp8
from flopwright.kernels.swiglu import reference
from flopwright.kernels.swiglu.op import gradients


@torch.library.custom_op("flopwright::situ_glu", mutates_args=())
def situ_glu(gate: Tensor, up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
    """Returns the activation; see `reference.situ_glu`."""
    if runs_triton("situ_glu", gate):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.forward(gate, up, (gate_bound, up_bound))
    return reference.situ_glu(gate, up, gate_bound, up_bound)


@situ_glu.register_fake
def _(gate: Tensor, up: Tensor, gate_bound: float, up_bound: float) -> Tensor:
    return gate.new_empty(gate.shape)


@torch.library.custom_op("flopwright::situ_glu_backward", mutates_args=())
def situ_glu_backward(
    grad: Tensor, gate: Tensor, up: Tensor, gate_bound: float, up_bound: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up."""
    if runs_triton("situ_glu", gate):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.backward(grad, gate, up, (gate_bound, up_bound))
    return reference.situ_glu_backward(grad, gate, up, gate_bound, up_bound)


@situ_glu_backward.register_fake
def _(
    grad: Tensor, gate: Tensor, up: Tensor, gate_bound: float, up_bound: float
) -> tuple[Tensor, Tensor]:
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    gate, up, *ctx.bounds = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return (*situ_glu_backward(grad, *ctx.saved_tensors, *ctx.bounds), None, None)


situ_glu.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("flopwright::gated_fp8", mutates_args=())
def gated_fp8(
    gate: Tensor, up: Tensor, bounds: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns (activation, codes and scales of gate, codes and scales of up).

    Args:
        bounds: [b1, b2] of SiTU-GLU, or [] for SwiGLU.
    """
    return _activated_and_kept(gate, up, bounds)


def _activated_and_kept(
    gate: Tensor, up: Tensor, bounds: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if runs_e4m3("gated_fp8", gate):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.forward_fp8(gate, up, _pair(bounds))
    y = reference.situ_glu(gate, up, *bounds) if bounds else reference.swiglu(gate, up)
    (g8, gs), (u8, us) = fp8.quantize(gate), fp8.quantize(up)
    return y, g8.contiguous(), gs, u8.contiguous(), us


def _pair(bounds: list[float]) -> tuple[float, float] | None:
    return (bounds[0], bounds[1]) if bounds else None


@gated_fp8.register_fake
def _(
    gate: Tensor, up: Tensor, bounds: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tiles = (*gate.shape[:-1], fp8.tiles(gate.shape[-1]))

    def kept() -> tuple[Tensor, Tensor]:
        codes = gate.new_empty(gate.shape, dtype=torch.float8_e4m3fn)
        return codes, gate.new_empty(tiles, dtype=torch.float32)

    return (gate.new_empty(gate.shape), *kept(), *kept())


@torch.library.custom_op("flopwright::gated_fp8_backward", mutates_args=())
def gated_fp8_backward(
    grad: Tensor, g8: Tensor, gs: Tensor, u8: Tensor, us: Tensor, bounds: list[float]
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of gate and up at the numbers that were kept."""
    if runs_e4m3("gated_fp8", grad):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.backward_fp8(grad, (g8, gs), (u8, us), _pair(bounds))
    return _gradients_at_kept(grad, (g8, gs), (u8, us), bounds)


def _gradients_at_kept(
    grad: Tensor, kept_gate: tuple[Tensor, Tensor], kept_up: tuple[Tensor, Tensor],
    bounds: list[float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    gate, up = (fp8.dequantize(*kept, grad.dtype) for kept in (kept_gate, kept_up))
    if bounds:
        return reference.situ_glu_backward(grad, gate, up, *bounds)
    return gradients(grad, gate, up)


@gated_fp8_backward.register_fake
def _(
    grad: Tensor, g8: Tensor, gs: Tensor, u8: Tensor, us: Tensor, bounds: list[float]
) -> tuple[Tensor, Tensor]:
    return grad.new_empty(grad.shape), grad.new_empty(grad.shape)


@torch.library.custom_op("flopwright::gated_fp8_packed", mutates_args=())
def gated_fp8_packed(
    gate_up: Tensor, bounds: list[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns the same of gate and up side by side: the halves have tiles of their own."""
    gate, up = gate_up.chunk(2, -1)
    return _activated_and_kept(gate, up, bounds)


@gated_fp8_packed.register_fake
def _(gate_up: Tensor, bounds: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    tiles = (*shape[:-1], fp8.tiles(shape[-1]))

    def kept() -> tuple[Tensor, Tensor]:
        codes = gate_up.new_empty(shape, dtype=torch.float8_e4m3fn)
        return codes, gate_up.new_empty(tiles, dtype=torch.float32)

    return (gate_up.new_empty(shape), *kept(), *kept())


@torch.library.custom_op("flopwright::gated_fp8_packed_backward", mutates_args=())
def gated_fp8_packed_backward(
    grad: Tensor, g8: Tensor, gs: Tensor, u8: Tensor, us: Tensor, bounds: list[float]
) -> Tensor:
    """Returns the gradient of gate and up side by side."""
    if runs_e4m3("gated_fp8", grad):
        import flopwright.kernels.swiglu.kernel as kernel

        return kernel.backward_fp8_packed(grad, (g8, gs), (u8, us), _pair(bounds))
    return torch.cat(_gradients_at_kept(grad, (g8, gs), (u8, us), bounds), -1)


@gated_fp8_packed_backward.register_fake
def _(grad: Tensor, g8: Tensor, gs: Tensor, u8: Tensor, us: Tensor, bounds: list[float]) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], 2 * grad.shape[-1]))


def _setup_fp8(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.bounds = inputs[-1]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward_fp8(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, Tensor, None]:
    return (*gated_fp8_backward(grad, *ctx.saved_tensors, ctx.bounds), None)


gated_fp8.register_autograd(_backward_fp8, setup_context=_setup_fp8)


def _backward_fp8_packed(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor, None]:
    return gated_fp8_packed_backward(grad, *ctx.saved_tensors, ctx.bounds), None


gated_fp8_packed.register_autograd(_backward_fp8_packed, setup_context=_setup_fp8)
