"""How tokens reach the experts that hold them: the protocol, and the one-rank case.

A MoE layer sorts its (token, choice) rows by expert, hands them to a dispatcher, runs its
local experts and gets the rows back in the order it sent them. Expert parallelism is a
dispatcher with an all-to-all in it; the layer does not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Rows that arrived at this rank's experts.

    Attributes:
        rows: [rows that arrived, hidden], grouped by local expert in ascending order,
            whichever rank they came from.
        counts: [local experts] int64 on the rows' device: rows of each local expert.
        handle: whatever `combine` needs to send the rows back; the layer only passes it on.
    """

    rows: Tensor
    counts: Tensor
    handle: Any = None


class Dispatcher(Protocol):
    """Moves rows to their experts and back; both directions are differentiable.

    A dispatcher may keep nothing between calls other than its process group: everything
    of one forward pass travels in `Dispatched.handle`, because a pipeline has several
    micro-batches in flight.
    """

    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        """Sends each row to the rank that holds its expert.

        Args:
            rows: [tokens * top_k, hidden], sorted by global expert.
            counts: [num_experts] int64, rows of each global expert on this rank. Expert e
                lives on the rank e // (num_experts / ep_size) of the expert group.
        """
        ...

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Returns the experts' results [tokens * top_k, hidden] in the order they were sent.

        Args:
            rows: results in the order of `Dispatched.rows`.
            handle: `Dispatched.handle` of the same forward pass.
        """
        ...


class LocalDispatch:
    """All experts live here: both directions are the identity."""

    def dispatch(self, rows: Tensor, counts: Tensor) -> Dispatched:
        """Returns the rows as they are."""
        return Dispatched(rows, counts)

    def combine(self, rows: Tensor, handle: Any) -> Tensor:
        """Returns the rows as they are."""
        return rows
