"""RMSNorm as Triton kernels: one program a row forward, one a block of rows backward.

Each row is read once, a residual added on the way where there is one; the weight's gradient
is summed over a program's rows in registers and over programs by torch, so that the result
does not depend on timing.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast
from flopwright.kernels.launch import launch, power_of_2, rows_of

_PROGRAMS_BACKWARD: Final = 256  # partial sums of the weight gradient: a few a multiprocessor


def _warps(width: int) -> int:
    """Returns the warps of a program: each thread holds a few dozen numbers of a row."""
    return 16 if width > 2048 else 8 if width > 1024 else 4


@triton.jit
def _forward(
    x_ptr, y_ptr, w_ptr, out_ptr, sum_ptr, rstd_ptr, x_stride, y_stride, width, eps,
    RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        y = tl.load(y_ptr + row * y_stride + columns, mask=mask, other=0.0).to(tl.float32)
        narrow = cast(x + y, sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * width + columns, narrow, mask=mask)
        x = narrow.to(tl.float32)  # the norm is that of what leaves
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    out = cast(x * rstd * w, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + columns, out, mask=mask)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def _backward(
    g_ptr, more_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, g_stride, more_stride, x_stride,
    width, rows, per_program, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """MORE: a gradient that reaches x by another way is added."""
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    w = tl.load(w_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program * per_program, tl.minimum((program + 1) * per_program, rows)):
        x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + columns, mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        scaled = x * rstd
        dw += g * scaled
        weighted = g * w
        mean = tl.sum(weighted * scaled, axis=0) / width
        dx = (weighted - scaled * mean) * rstd
        if MORE:
            more = tl.load(more_ptr + row * more_stride + columns, mask=mask, other=0.0)
            dx += more.to(tl.float32)
        dx = cast(dx, dx_ptr.dtype.element_ty)
        tl.store(dx_ptr + row * width + columns, dx, mask=mask)
    tl.store(dw_ptr + program * width + columns, dw, mask=mask)


def forward(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (normalised, rstd fp32 [...], x + residual; x itself without one)."""
    rows = rows_of(x)
    more = rows if residual is None else rows_of(residual)
    count, width = rows.shape
    out = x.new_empty(x.shape)
    total = x if residual is None else x.new_empty(x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    launch(
        _forward, (count,), rows, more, weight.contiguous(), out, total, rstd, rows.stride(0),
        more.stride(0), width, eps, RESIDUAL=residual is not None, BLOCK=power_of_2(width),
        num_warps=_warps(width),
    )  # fmt: skip
    return out, rstd, total


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, more: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of x (plus `more`) and of weight; see the reference."""
    rows, grads = rows_of(x), rows_of(grad)
    others = grads if more is None else rows_of(more)
    count, width = rows.shape
    grad_x = x.new_empty(x.shape)
    programs = max(1, min(_PROGRAMS_BACKWARD, count))
    partial = x.new_zeros((programs, width), dtype=torch.float32)
    launch(
        _backward, (programs if count else 0,), grads, others, rows,
        weight.contiguous(), rstd.contiguous(), grad_x, partial,
        grads.stride(0), others.stride(0), rows.stride(0), width, count, -(-count // programs),
        MORE=more is not None, BLOCK=power_of_2(width), num_warps=_warps(width),
    )  # fmt: skip
    return grad_x, partial.sum(0).to(weight.dtype)
