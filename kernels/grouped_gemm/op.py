"""One matrix product an expert as an op: saves its input and the counts (and the weight).

On a GPU torch's grouped product (bf16 only) or the Triton kernel, neither with a host sync.
The reference loops over the experts: on a CPU that is as quick, and it works in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.dispatch import Kernel, kernel_for
from flopwright.kernels.gradients import weight_gradient

_ALIGNMENT = 8  # bf16 numbers in 16 bytes: torch's grouped product takes strides of these only


def _kernel(x: Tensor, *strides: int) -> Kernel:
    found = kernel_for("grouped_gemm", x)
    taken = x.dtype == torch.bfloat16 and not any(s % _ALIGNMENT for s in strides)
    return "triton" if found == "library" and not taken else found


def _offsets(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


@torch.library.custom_op("flopwright::grouped_gemm", mutates_args=())
def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns y [N, out]; see `reference.grouped_gemm`."""
    found = _kernel(x, *x.shape[1:], *weight.shape[1:])
    if found == "triton":
        import flopwright.kernels.grouped_gemm.kernel as kernel

        return kernel.forward(x, weight, counts)
    if found == "library":
        return torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=_offsets(counts))
    y = x.new_empty(x.shape[0], weight.shape[1])
    for expert, part in _parts(counts):
        torch.mm(x[part], weight[expert].t(), out=y[part])
    return y


@grouped_gemm.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op("flopwright::grouped_gemm_input_gradient", mutates_args=())
def grouped_gemm_input_gradient(grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns the gradient of x [N, in]."""
    found = _kernel(grad, *grad.shape[1:], *weight.shape[1:])
    if found == "triton":
        import flopwright.kernels.grouped_gemm.kernel as kernel

        return kernel.input_gradient(grad, weight, counts)
    if found == "library":
        return torch._grouped_mm(grad.contiguous(), weight, offs=_offsets(counts))
    grad_x = grad.new_empty(grad.shape[0], weight.shape[2])
    for expert, part in _parts(counts):
        torch.mm(grad[part], weight[expert], out=grad_x[part])
    return grad_x


@grouped_gemm_input_gradient.register_fake
def _(grad: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grad.new_empty((grad.shape[0], weight.shape[2]))


@torch.library.custom_op("flopwright::grouped_gemm_weight_gradient", mutates_args=())
def grouped_gemm_weight_gradient(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    """Returns the gradient of weight [E, out, in]; experts without rows get zero."""
    found = _kernel(grad, grad.shape[1], x.shape[1])
    if found == "triton":
        import flopwright.kernels.grouped_gemm.kernel as kernel

        return kernel.weight_gradient(grad, x, counts)
    if found == "library":
        return torch._grouped_mm(grad.contiguous().t(), x.contiguous(), offs=_offsets(counts))
    grad_weight = grad.new_zeros(len(counts), grad.shape[1], x.shape[1])
    for expert, part in _parts(counts):
        torch.mm(grad[part].t(), x[part], out=grad_weight[expert])
    return grad_weight


@grouped_gemm_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    return grad.new_empty((len(counts), grad.shape[1], x.shape[1]))


def _parts(counts: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields each expert that has rows, and where they are."""
    start = 0
    for expert, rows in enumerate(counts.tolist()):
        if rows:
            yield expert, slice(start, start + rows)
        start += rows


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, counts = ctx.saved_tensors
    need_x, need_weight, _ = ctx.needs_input_grad
    grad_x = grad_weight = None
    if need_x:
        grad_x = grouped_gemm_input_gradient(grad, weight, counts)
    if need_weight:
        grad_weight = weight_gradient(ctx, 1, grouped_gemm_weight_gradient, grad, x, counts)
    return grad_x, grad_weight, None


grouped_gemm.register_autograd(_backward, setup_context=_setup)
