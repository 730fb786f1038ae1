"""Causal attention within each of several documents that stand one behind the other in a row.

Whichever kernel `attention` runs is run on each document by itself: only pairs of one document
are ever computed, and a document alone gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flopwright.kernels.attention.max_logit import max_logit
from flopwright.kernels.attention.op import attention, gradients
from flopwright.kernels.linear.reference import wide_dtype


def document_slices(bounds: Sequence[int]) -> Iterator[slice]:
    """Yields the tokens of each document."""
    return (slice(first, end) for first, end in pairwise(bounds))


@torch.library.custom_op("flopwright::document_attention", mutates_args=())
def document_attention(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    """Returns (output [1, T, H, V], log-sum-exp [1, H, T]); see `op.attention`.

    Args:
        q: [1, T, H, D]; k: [1, T, G, D]; v: [1, T, G, V].
        bounds: where documents begin, ascending from 0, and their end T.
    """
    assert (bounds[0], bounds[-1]) == (0, q.shape[1])
    out, lse = _empty(q, v)
    for part in document_slices(bounds):
        out[:, part], lse[..., part] = attention(q[:, part], k[:, part], v[:, part], scale, window)
    return out, lse


@document_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bounds: Sequence[int], scale: float, window: int = 0
) -> tuple[Tensor, Tensor]:
    return _empty(q, v)


def _empty(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _width = q.shape
    out = q.new_empty((batch, tokens, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, tokens), dtype=wide_dtype(q.dtype))


def document_max_logit(
    q: Tensor, k: Tensor, bounds: Sequence[int], scale: float, window: int = 0
) -> Tensor:
    """Returns the largest logit of each head [H] over the pairs in sight; see `max_logit`."""
    found = [max_logit(q[:, part], k[:, part], scale, window) for part in document_slices(bounds)]
    return torch.stack(found).amax(0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.bounds, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    found = tuple(torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v))
    for part in document_slices(ctx.bounds):
        parts = gradients(
            grad[:, part], q[:, part], k[:, part], v[:, part], out[:, part], lse[..., part],
            ctx.scale, ctx.window,
        )  # fmt: skip
        for whole, piece in zip(found, parts, strict=True):
            whole[:, part] = piece
    return (*found, None, None, None)


document_attention.register_autograd(_backward, setup_context=_setup)
