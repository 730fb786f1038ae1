"""Expert parallelism: the dispatcher that carries rows to the ranks of their experts and back.

Gradients take the same way home. An expert's gradient is then the sum over the tokens of
all ranks of its group, so it is reduced over the ranks that hold the same experts and
divided by the whole data-parallel size (data_parallel/).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.groups import Group
from flopwright.models.moe.dispatch import Dispatched


class Clock(Protocol):
    """What the dispatcher needs of the action timer."""

    def action(self, name: str, cls: str, nbytes: int = 0) -> AbstractContextManager[None]:
        """Times what runs inside."""
        ...


@dataclass(frozen=True, slots=True)
class Route:
    """How the rows of one forward pass travelled.

    Attributes:
        sent, received: rows to and from each rank of the group.
        order: position in the arrival order of each row in local-expert order.
        place: its inverse: position in local-expert order of each row that arrived.
    """

    sent: list[int]
    received: list[int]
    order: Tensor
    place: Tensor


class _Reorder(torch.autograd.Function):
    """A permutation of rows; its backward gathers too, where index_select would scatter-add."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(place)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (place,) = ctx.saved_tensors
        return grad.index_select(0, place), None, None


def _reorder(rows: Tensor, order: Tensor, place: Tensor) -> Tensor:
    out: Tensor = _Reorder.apply(rows, order, place)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """All-to-all of rows; its backward is the all-to-all the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: list[int],
        received: list[int],
        group: Group,
        clock: Clock,
        name: str,
    ) -> Tensor:
        ctx.travel = (sent, received, group, clock, name)
        return _exchange(rows, sent, received, group, clock, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        sent, received, group, clock, name = ctx.travel
        back = _exchange(grad, received, sent, group, clock, f"{name}_grad")
        return back, None, None, None, None, None


def _exchange(
    rows: Tensor, sent: list[int], received: list[int], group: Group, clock: Clock, name: str
) -> Tensor:
    rows = rows.contiguous()
    out = rows.new_empty((sum(received), *rows.shape[1:]))
    nbytes = rows.numel() * rows.element_size()
    with clock.action(name, "ep_comm", nbytes):
        dist.all_to_all_single(out, rows, received, sent, group=group.handle)
    return out


@dataclass(frozen=True, slots=True)
class AllToAllDispatch:
    """Dispatcher of models/moe/dispatch.py over an expert group: nothing is dropped.

    Attributes:
        balanced: take it that every rank sends each rank the same number of rows, whatever
            the router chose: for runs without values, in which no count can be read.
    """

    group: Group
    clock: Clock
    balanced: bool = False

    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        """Sends each row to the rank that holds its expert; see the protocol."""
        arrived = torch.empty_like(counts)
        with self.clock.action("ep_counts", "ep_comm", counts.numel() * 8):
            dist.all_to_all_single(arrived, counts.contiguous(), group=self.group.handle)
        by_source = arrived.view(self.group.size, -1)  # [source rank, local expert]
        sent, received = self._splits(counts, by_source, len(rows))
        moved = self._move(rows, sent, received, "ep_dispatch")
        order = by_expert(by_source, sum(received))
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        route = Route(sent, received, order, place)
        return Dispatched(_reorder(moved, order, place), by_source.sum(0), route)

    def _splits(
        self, counts: Tensor, by_source: Tensor, num_rows: int
    ) -> tuple[list[int], list[int]]:
        """Returns the rows to and from each rank."""
        if self.balanced:
            each, rest = divmod(num_rows, self.group.size)
            assert rest == 0, f"{num_rows} rows do not spread evenly over {self.group.size} ranks"
            return [each] * self.group.size, [each] * self.group.size
        sent = counts.view(self.group.size, -1).sum(1).tolist()
        return sent, by_source.sum(1).tolist()

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Returns the results in the order the rows were sent."""
        assert isinstance(handle, Route)
        arrived = _reorder(rows, handle.place, handle.order)
        return self._move(arrived, handle.received, handle.sent, "ep_combine")

    def _move(self, rows: Tensor, sent: list[int], received: list[int], name: str) -> Tensor:
        out: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            rows, sent, received, self.group, self.clock, name
        )
        return out


def by_expert(by_source: Tensor, num_rows: int) -> Tensor:
    """Returns the arrival positions in local-expert order; stable, so sources keep their order."""
    local_experts = torch.arange(by_source.shape[1], device=by_source.device)
    expert_of_row = local_experts.repeat(by_source.shape[0]).repeat_interleave(
        by_source.reshape(-1), output_size=num_rows
    )
    return expert_of_row.argsort(stable=True)
