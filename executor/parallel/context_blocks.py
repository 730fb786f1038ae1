"""Attention of a rank's queries to the keys of one rank of its context group after another.

Backward the keys come by once more, and each block's gradients follow from the joined result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flopwright.kernels.attention.block import (
    attention_block,
    attention_block_backward,
    merge_,
)
from flopwright.kernels.linear.reference import wide_dtype

if TYPE_CHECKING:
    from flopwright.executor.parallel.context import GroupContextParallel, Passing


def attention_over_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cp: GroupContextParallel
) -> Tensor:
    """Returns causal attention [B, S, H, V] of this rank's tokens over the whole sequence."""
    out: Tensor = _OverBlocks.apply(q, k, v, scale, cp)  # type: ignore[no-untyped-call]
    return out


def _pack(*tensors: Tensor) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpack(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [t.numel() for t in like])
    return [part.view(t.shape) for part, t in zip(parts, like, strict=True)]


@dataclass(frozen=True, slots=True)
class _Sight:
    """Which of a rank's queries see which tokens of another rank."""

    queries: slice
    keys: slice
    causal: bool


def _sight(mine: int, other: int, tokens: int) -> _Sight:
    """Returns what rank `mine` sees of rank `other`, each with `tokens` tokens in two runs.

    An earlier rank's first run lies before all own tokens and its second behind them; of a
    later rank's runs both lie before the own second run and behind the first.
    """
    half = tokens // 2
    if mine == other:
        return _Sight(slice(None), slice(None), causal=True)
    if other < mine:
        return _Sight(slice(None), slice(half), causal=False)
    return _Sight(slice(half, None), slice(None), causal=False)


class _OverBlocks(torch.autograd.Function):
    """Attention to the keys of one rank after another, joined by their log-sum-exps."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, cp: GroupContextParallel
    ) -> Tensor:
        ctx.scale, ctx.cp = scale, cp
        out, lse = attention_block(q, k, v, scale, True)
        joined = _Joined(out.to(wide_dtype(q.dtype)), lse, q, scale)
        for other, (keys, values) in _others(cp, k, v):
            joined.add(_sight(cp.index, other, q.shape[1]), keys, values)
        result = joined.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        back = _Backward(grad.contiguous(), q, out, lse, ctx.scale, ctx.cp.index)
        if ctx.cp.kind == "ring":
            key, value = _ring_backward(ctx.cp, back, k, v)
        else:
            key, value = _gathered_backward(ctx.cp, back, k, v)
        return back.query.to(q.dtype), key, value, None, None


@dataclass(slots=True)
class _Joined:
    """The result so far: out [B, S, H, V] at least fp32, lse [B, H, S]."""

    out: Tensor
    lse: Tensor
    q: Tensor
    scale: float

    def add(self, sight: _Sight, keys: Tensor, values: Tensor) -> None:
        rows, seen = sight.queries, sight.keys
        more, more_lse = attention_block(
            self.q[:, rows].contiguous(), keys[:, seen].contiguous(),
            values[:, seen].contiguous(), self.scale, False,
        )  # fmt: skip
        merge_(self.out[:, rows], self.lse[:, :, rows], more, more_lse)


class _Backward:
    """Gradients block by block; `query` collects that of the queries, at least fp32."""

    def __init__(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, scale: float, index: int
    ) -> None:
        self._saved = (grad, q, out, lse)
        self._scale, self._index = scale, index
        self.query = torch.zeros_like(q, dtype=wide_dtype(q.dtype))

    def block(self, other: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns this rank's part of the gradients of another's keys and values."""
        grad, q, out, lse = self._saved
        sight = _sight(self._index, other, q.shape[1])
        rows, seen = sight.queries, sight.keys
        query, key, value = attention_block_backward(
            grad[:, rows].contiguous(), q[:, rows].contiguous(), k[:, seen].contiguous(),
            v[:, seen].contiguous(), out[:, rows].contiguous(), lse[:, :, rows].contiguous(),
            self._scale, sight.causal,
        )  # fmt: skip
        self.query[:, rows] += query
        return _filled(key, k, seen), _filled(value, v, seen)


def _filled(part: Tensor, like: Tensor, place: slice) -> Tensor:
    if part.shape == like.shape:
        return part
    whole = torch.zeros_like(like)
    whole[:, place] = part
    return whole


def _others(cp: GroupContextParallel, k: Tensor, v: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
    """Yields (rank, (keys, values)) of every other rank of the group."""
    own = _pack(k, v)
    if cp.kind == "all_gather":
        parts = cp.all_gather(own, "kv_context")
        for other in range(cp.size):
            if other != cp.index:
                yield other, _unpack(parts[other], (k, v))
        return
    passing = cp.pass_on(own, 0)
    for step in range(1, cp.size):
        here = cp.arrive(passing, "kv_context")
        if step < cp.size - 1:
            passing = cp.pass_on(here, 0)
        yield (cp.index - step) % cp.size, _unpack(here, (k, v))


def _gathered_backward(
    cp: GroupContextParallel, back: _Backward, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    parts = cp.all_gather(_pack(k, v), "kv_context_again")
    gradients = torch.empty_like(parts)
    for other in range(cp.size):
        keys, values = (k, v) if other == cp.index else _unpack(parts[other], (k, v))
        gradients[other] = _pack(*back.block(other, keys, values))
    key, value = _unpack(cp.reduce_scatter(gradients, "kv_context_grad"), (k, v))
    return key, value


def _ring_backward(
    cp: GroupContextParallel, back: _Backward, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the own keys and values, which come home with the last step.

    The gradient of a block leaves with the rank that sees it first, follows the block round,
    and each rank adds its part.
    """
    own = _pack(k, v)
    passing = cp.pass_on(own, 0)
    home = _pack(*back.block(cp.index, k, v))
    coming: Passing | None = None
    for step in range(1, cp.size):
        here = cp.arrive(passing, "kv_context_again")
        if step < cp.size - 1:
            passing = cp.pass_on(here, 0)
        gradient = _pack(*back.block((cp.index - step) % cp.size, *_unpack(here, (k, v))))
        if coming is not None:
            gradient += cp.arrive(coming, "kv_context_grad")
        coming = cp.pass_on(gradient, 1)
    assert coming is not None
    home += cp.arrive(coming, "kv_context_grad")
    key, value = _unpack(home, (k, v))
    return key, value
