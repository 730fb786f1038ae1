"""RMSNorm as Triton kernels: one program a row forward, one a block of rows backward.

Each row is read once; the weight's gradient is summed over a program's rows in registers
and over programs by torch, so that the result does not depend on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_BACKWARD = 256  # partial sums of the weight gradient: a few a multiprocessor


@triton.jit  # type: ignore[untyped-decorator]
def _forward(x_ptr, w_ptr, y_ptr, rstd_ptr, stride, width, eps, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / width + eps)
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + columns, x * rstd * w, mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    g_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, stride, width, rows, per_program,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program * per_program, tl.minimum((program + 1) * per_program, rows)):
        x = tl.load(x_ptr + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        scaled = x * rstd
        dw += g * scaled
        weighted = g * w
        mean = tl.sum(weighted * scaled, axis=0) / width
        tl.store(dx_ptr + row * width + columns, (weighted - scaled * mean) * rstd, mask=mask)
    tl.store(dw_ptr + program * width + columns, dw, mask=mask)


def _rows(x: Tensor) -> Tensor:
    """Returns x as [rows, width] with unit column stride, a view where strides allow."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns (y like x, rstd fp32 [...]); see `reference.rms_norm`."""
    rows = _rows(x)
    count, width = rows.shape
    y = x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    if count:
        block = triton.next_power_of_2(width)
        _forward[(count,)](rows, weight, y, rstd, rows.stride(0), width, eps, BLOCK=block)
    return y, rstd


def backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x and of weight; see `reference.rms_norm_backward`."""
    rows = _rows(x)
    count, width = rows.shape
    grad_x = x.new_empty(x.shape)
    programs = max(1, min(_PROGRAMS_BACKWARD, count))
    partial = x.new_zeros((programs, width), dtype=torch.float32)
    if count:
        _backward[(programs,)](
            _rows(grad).contiguous(), rows, weight, rstd, grad_x, partial, rows.stride(0), width,
            count, triton.cdiv(count, programs), BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype)
