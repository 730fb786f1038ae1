"""Head and cross-entropy as Triton kernels.

Forward: a program makes the logits of a block of tokens over a part of the vocabulary, tile by
tile, and keeps their running maximum and sum; parts are joined by torch. Backward: a tile of
logits is made again and leaves as its gradient, one part of the vocabulary at a time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import LOG2E, cast, dot
from flopwright.kernels.launch import Target, ceil_div, launch, target


@triton.jit
def logits_tile(
    x_ptr, w_ptr, row, column, rows, columns, hidden, x_stride, w_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Returns x[row] @ w[column]^T [BM, BN] in fp32."""
    inner = tl.arange(0, BK)
    x = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w = w_ptr + column.to(tl.int64)[None, :] * w_stride + inner[:, None]
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, hidden, BK):
        there = inner < hidden - k
        a = tl.load(x, mask=(row < rows)[:, None] & there[None, :], other=0.0)
        b = tl.load(w, mask=(column < columns)[None, :] & there[:, None], other=0.0)
        acc = dot(a, b, acc)
        x += BK
        w += BK
    return acc


@triton.jit
def _statistics(
    x_ptr, w_ptr, target_ptr, best_ptr, total_ptr, chosen_ptr, rows, vocab, hidden, x_stride,
    w_stride, tiles, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Of one part of the vocabulary: largest logit, sum of e^(logit - it), target's logit."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    part = tl.program_id(1)
    wanted = tl.load(target_ptr + row, mask=row < rows, other=-1)
    best = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    chosen = tl.zeros((BM,), dtype=tl.float32)
    first = part * tiles * BN
    for start in range(first, tl.minimum(first + tiles * BN, vocab), BN):
        column = start + tl.arange(0, BN)
        z = logits_tile(
            x_ptr, w_ptr, row, column, rows, vocab, hidden, x_stride, w_stride, BM, BN, BK
        )
        chosen += tl.sum(tl.where(column[None, :] == wanted[:, None], z, 0.0), 1)
        z = tl.where((column < vocab)[None, :], z, float("-inf"))
        higher = tl.maximum(best, tl.max(z, 1))
        total *= tl.exp2((best - higher) * LOG2E)
        total += tl.sum(tl.exp2((z - higher[:, None]) * LOG2E), 1)
        best = higher
    place = part.to(tl.int64) * rows + row
    tl.store(best_ptr + place, best, mask=row < rows)
    tl.store(total_ptr + place, total, mask=row < rows)
    tl.store(chosen_ptr + place, chosen, mask=row < rows)


@triton.jit
def _gradient(
    x_ptr, w_ptr, target_ptr, lse_ptr, grad_ptr, d_ptr, rows, first, end, hidden, x_stride,
    w_stride, d_stride, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """d = (softmax - one-hot of the target) * grad / rows, for columns first .. end."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    place = tl.program_id(1) * BN + tl.arange(0, BN)
    column = first + place
    z = logits_tile(x_ptr, w_ptr, row, column, rows, end, hidden, x_stride, w_stride, BM, BN, BK)
    level = tl.load(lse_ptr + row, mask=row < rows, other=0.0)
    log_sum = tl.load(lse_ptr + rows + row, mask=row < rows, other=0.0)
    wanted = tl.load(target_ptr + row, mask=row < rows, other=-1)
    p = tl.exp2(((z - level[:, None]) - log_sum[:, None]) * LOG2E)
    p -= (column[None, :] == wanted[:, None]).to(tl.float32)
    d = p * (tl.load(grad_ptr) / rows)
    to = d_ptr + row.to(tl.int64)[:, None] * d_stride + place[None, :]
    inside = (row < rows)[:, None] & (column < end)[None, :]
    tl.store(to, cast(d, d_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Block sizes and how many warps and stages they run with."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int

    @property
    def constants(self) -> dict[str, int]:
        """The kernel's constants and options."""
        return {
            "BM": self.m, "BN": self.n, "BK": self.k, "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }  # fmt: skip


def tiles(dtype: torch.dtype, place: Target) -> Tiles:
    """Returns the tiles of a product over the hidden width."""
    if place.name == "interpreter":
        return Tiles(32, 64, 64, 4, 1)
    if dtype == torch.float32:
        return Tiles(64, 64, 16, 4, 2)
    if place.shared_bytes < 128 * 1024:
        return Tiles(128, 128, 64, 8, 2)
    return Tiles(128, 128, 64, 8, 3 if place.name == "sm_80" else 4)


def parts_of(rows: int, vocab: int, t: Tiles) -> tuple[int, int]:
    """Returns (parts of the vocabulary, tiles a part): enough programs for any card."""
    columns = ceil_div(vocab, t.n)
    wanted = max(1, min(columns, ceil_div(1024, max(1, ceil_div(rows, t.m)))))
    tiles_a_part = ceil_div(columns, wanted)
    return ceil_div(columns, tiles_a_part), tiles_a_part


def statistics(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (log-sum-exp in two parts [2, N], the target's logit [N]) in fp32.

    Args:
        x: [N, hidden]; weight: [vocabulary, hidden], both with unit column stride.
        targets: [N] int64; -1 for none.
    """
    rows, hidden = x.shape
    vocab, t = weight.shape[0], tiles(x.dtype, target(x.device))
    parts, per_part = parts_of(rows, vocab, t)
    best, total, chosen = (x.new_empty(parts, rows, dtype=torch.float32) for _ in range(3))
    launch(
        _statistics, (ceil_div(rows, t.m), parts), x, weight, targets.contiguous(), best, total,
        chosen, rows, vocab, hidden, x.stride(0), weight.stride(0), per_part, **t.constants,
    )  # fmt: skip
    level = best.amax(0)
    log_sum = ((best - level).exp() * total).sum(0).log()
    return torch.stack((level, log_sum)), chosen.sum(0)


def gradient_part(
    x: Tensor, weight: Tensor, targets: Tensor, lse: Tensor, grad: Tensor, first: int, end: int
) -> Tensor:
    """Returns the gradient [N, end - first] of the logits of these columns, like x."""
    rows, hidden = x.shape
    t = tiles(x.dtype, target(x.device))
    d = x.new_empty(rows, end - first)
    launch(
        _gradient, (ceil_div(rows, t.m), ceil_div(end - first, t.n)), x, weight,
        targets.contiguous(), lse.contiguous(), grad, d, rows, first, end, hidden, x.stride(0),
        weight.stride(0), d.stride(0), **t.constants,
    )  # fmt: skip
    return d
