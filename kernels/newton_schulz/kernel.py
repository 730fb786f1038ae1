"""Symmetric products of stacks of matrices as a Triton kernel: half of the tiles are made.

A tile below the diagonal is written to its mirror's place too. The product with the matrix
itself is the library's.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast, dot
from flopwright.kernels.launch import Target, ceil_div, launch, target
from flopwright.kernels.newton_schulz.cost import ITERATIONS, TILE
from flopwright.kernels.newton_schulz.reference import COEFFICIENTS, normalised


@triton.jit
def _symmetric(
    x_ptr, more_ptr, y_ptr, rows, columns, stride_batch, stride_row, stride_column, alpha, beta,
    MORE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """y = alpha * x x^T (+ beta * more), y and `more` contiguous [batch, rows, rows]."""
    tile, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    # The tile's place in the lower triangle, row by row: i (i + 1) / 2 + j.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > tile, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= tile, i + 1, i)
    j = tile - i * (i + 1) // 2
    row, mirror = i * BM + tl.arange(0, BM), j * BM + tl.arange(0, BM)
    inner = tl.arange(0, BK)
    x = x_ptr + batch * stride_batch
    a = x + row[:, None] * stride_row + inner[None, :] * stride_column
    b = x + mirror[None, :] * stride_row + inner[:, None] * stride_column
    acc = tl.zeros((BM, BM), dtype=tl.float32)
    for k in range(0, columns, BK):
        there = inner < columns - k
        left = tl.load(a, mask=(row < rows)[:, None] & there[None, :], other=0.0)
        right = tl.load(b, mask=(mirror < rows)[None, :] & there[:, None], other=0.0)
        acc = dot(left, right, acc)
        a += BK * stride_column
        b += BK * stride_column
    acc *= alpha
    inside = (row < rows)[:, None] & (mirror < rows)[None, :]
    place = batch * rows * rows + row[:, None] * rows + mirror[None, :]
    if MORE:
        more = tl.load(more_ptr + place, mask=inside, other=0.0)
        acc += beta * more.to(tl.float32)
    y = cast(acc, y_ptr.dtype.element_ty)
    tl.store(y_ptr + place, y, mask=inside)
    if i != j:
        across = batch * rows * rows + mirror[:, None] * rows + row[None, :]
        tl.store(y_ptr + across, tl.trans(y), mask=tl.trans(inside))


def _blocks(dtype: torch.dtype, place: Target) -> tuple[int, int, int, int]:
    """Returns (tile, depth, warps, stages)."""
    if place.name == "interpreter":
        return 32, 64, 4, 1
    if dtype == torch.float32:
        return 64, 16, 4, 2
    if place.shared_bytes < 128 * 1024:
        return TILE, 64, 8, 2
    return TILE, 64, 8, 3


def symmetric(x: Tensor, alpha: float, more: Tensor | None = None, beta: float = 0.0) -> Tensor:
    """Returns alpha * x x^T + beta * more of a stack [batch, rows, columns]."""
    batch, rows, columns = x.shape
    y = x.new_empty(batch, rows, rows)
    tile, depth, num_warps, num_stages = _blocks(x.dtype, target(x.device))
    n = ceil_div(rows, tile)
    launch(
        _symmetric, (n * (n + 1) // 2, batch), x, more if more is not None else x, y, rows,
        columns, *x.stride(), alpha, beta, MORE=more is not None, BM=tile, BK=depth,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


def newton_schulz(matrices: Tensor) -> Tensor:
    """Returns the iteration's result; see the reference."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    shape = (matrices.mT if tall else matrices).shape
    x = normalised((matrices.mT if tall else matrices).reshape(-1, *shape[-2:]))
    for _ in range(ITERATIONS):
        gram = symmetric(x, 1.0)
        x = torch.baddbmm(x, symmetric(gram, c, gram, b), x, beta=a)
    x = x.view(shape)
    return x.mT if tall else x
