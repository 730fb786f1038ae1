"""One matrix product an expert as an op: saves its input and the counts (and the weight).

CUDA bf16 runs torch's grouped product, without a host sync. Everything else loops over the
experts: on a CPU that is as quick, and it works in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def _grouped(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _offsets(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=torch.int32)


@torch.library.custom_op("flopwright::grouped_gemm", mutates_args=())
def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Returns y [N, out]; see `reference.grouped_gemm`."""
    if _grouped(x):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=_offsets(counts))
    y = x.new_empty(x.shape[0], weight.shape[1])
    start = 0
    for expert, rows in enumerate(counts.tolist()):
        if rows:
            torch.mm(x[start : start + rows], weight[expert].t(), out=y[start : start + rows])
        start += rows
    return y


@grouped_gemm.register_fake
def _(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[1]))


@torch.library.custom_op("flopwright::grouped_gemm_backward", mutates_args=())
def grouped_gemm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of weight; experts without rows get zero."""
    grad = grad.contiguous()
    if _grouped(x):
        offsets = _offsets(counts)
        grad_x = torch._grouped_mm(grad, weight, offs=offsets)
        return grad_x, torch._grouped_mm(grad.t(), x, offs=offsets)
    grad_x, grad_weight = torch.empty_like(x), torch.empty_like(weight)
    start = 0
    for expert, rows in enumerate(counts.tolist()):
        part = slice(start, start + rows)
        if rows:
            torch.mm(grad[part], weight[expert], out=grad_x[part])
            torch.mm(grad[part].t(), x[part], out=grad_weight[expert])
        else:
            grad_weight[expert].zero_()
        start += rows
    return grad_x, grad_weight


@grouped_gemm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    grad_x, grad_weight = grouped_gemm_backward(grad, *ctx.saved_tensors)
    return grad_x, grad_weight, None


grouped_gemm.register_autograd(_backward, setup_context=_setup)
