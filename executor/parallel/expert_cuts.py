"""Experts whose matrices several ranks cut between them: they share the rows that arrive.

Each rank's rows are gathered by all ranks of the group, every one computes its part of the
inner width, and the partial results are summed and scattered back. Where the ranks have
unlike numbers of rows they are padded to the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.experts import Clock, by_expert
from flopwright.executor.parallel.groups import Group
from flopwright.models.moe.dispatch import Dispatched, Dispatcher


@dataclass(frozen=True, slots=True)
class _Shared:
    """How the rows of one forward pass were shared.

    Attributes:
        own: rows of this rank; longest: of the rank that has most.
        order: place in the gathered rows, padding included, of each row in expert order.
        handle: what the dispatcher underneath needs.
    """

    own: int
    longest: int
    order: Tensor
    handle: Any


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Dispatcher of models/moe/dispatch.py around another one, over the group that cuts experts.

    Attributes:
        balanced: every rank has as many rows as every other, and nobody asks.
    """

    inner: Dispatcher
    group: Group
    clock: Clock
    balanced: bool = False

    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        """Returns the rows of all ranks of the group that arrived at these experts."""
        arrived = self.inner.dispatch(rows, counts)
        by_rank = self._counts(arrived.counts)
        own = arrived.rows.shape[0]
        numbers = [own] * self.group.size if self.balanced else by_rank.sum(1).tolist()
        longest = max(numbers)
        gathered = _Gather.apply(  # type: ignore[no-untyped-call]
            _padded(arrived.rows, longest), self.group, self.clock, "experts.rows"
        )
        order = by_expert(by_rank, sum(numbers))
        places = torch.cat(
            [torch.arange(n, device=order.device) + r * longest for r, n in enumerate(numbers)]
        )
        order = places[order]
        shared = _Shared(own, longest, order, arrived.handle)
        taken = _Take.apply(gathered, order)  # type: ignore[no-untyped-call]
        return Dispatched(taken, by_rank.sum(0), shared)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Returns the sums over the group of the rows that this rank had sent."""
        assert isinstance(handle, _Shared)
        length = self.group.size * handle.longest
        placed = _Place.apply(rows, handle.order, length)  # type: ignore[no-untyped-call]
        summed = _Scatter.apply(  # type: ignore[no-untyped-call]
            placed, self.group, self.clock, "experts.results"
        )
        return self.inner.combine(summed[: handle.own], handle.handle)

    def _counts(self, counts: Tensor) -> Tensor:
        """Returns the ranks' rows by expert, [size, local experts]."""
        out = counts.new_empty(self.group.size * counts.shape[0])
        with self.clock.action("etp_counts", "ep_comm", out.numel() * 8):
            dist.all_gather_single(out, counts.contiguous(), group=self.group.handle)
        return out.view(self.group.size, -1)


def _padded(rows: Tensor, length: int) -> Tensor:
    missing = length - rows.shape[0]
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _all_gather(x: Tensor, group: Group, clock: Clock, name: str) -> Tensor:
    out = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    with clock.action(f"all_gather:{name}", "ep_comm", out.numel() * out.element_size()):
        dist.all_gather_single(out, x.contiguous(), group=group.handle)
    return out


def _reduce_scatter(x: Tensor, group: Group, clock: Clock, name: str) -> Tensor:
    out = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    with clock.action(f"reduce_scatter:{name}", "ep_comm", x.numel() * x.element_size()):
        dist.reduce_scatter_single(out, x.contiguous(), group=group.handle)
    return out


class _Gather(torch.autograd.Function):
    """Rows of all ranks; backward sums and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, clock: Clock, name: str) -> Tensor:
        ctx.travel = (group, clock, f"{name}_grad")
        return _all_gather(x, group, clock, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(grad, *ctx.travel), None, None, None


class _Scatter(torch.autograd.Function):
    """This rank's rows of the sum; backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, clock: Clock, name: str) -> Tensor:
        ctx.travel = (group, clock, f"{name}_grad")
        return _reduce_scatter(x, group, clock, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_gather(grad, *ctx.travel), None, None, None


class _Take(torch.autograd.Function):
    """Rows at distinct places; backward puts them back among zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        ctx.length = rows.shape[0]
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return _put(grad, order, ctx.length), None


class _Place(torch.autograd.Function):
    """Rows put at distinct places among zeros; backward takes them out."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, length: int) -> Tensor:
        ctx.save_for_backward(order)
        return _put(rows, order, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


def _put(rows: Tensor, order: Tensor, length: int) -> Tensor:
    return rows.new_zeros((length, *rows.shape[1:])).index_copy_(0, order, rows)
