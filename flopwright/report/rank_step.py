"""What one rank does in one step, as a list: predicted by the simulator, recorded by a dry run.

Both sides fill the same record, so that comparing them is field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Call(NamedTuple):
    """One collective, or one message of a pipeline.

    Attributes:
        action: the entry of the rank's list in which it is started, "F(0,3)".
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast",
            "send" or "recv".
        ranks: global ranks that take part, in group order; for messages (from, to).
        nbytes: payload as in ops.CommTable: the full tensor of all-reduce, all-gather and
            reduce-scatter; what the rank sends to others of all-to-all; the message.
    """

    action: str
    collective: str
    ranks: tuple[int, ...]
    nbytes: int


class Product(NamedTuple):
    """One shape of matrix product or attention, by the kind of action that ran it.

    Attributes:
        action: kind of the list's entry, "F".
        kernel: "gemm", "grouped_gemm" or "attention".
        m, k, n, batch: as in ops.OpTable.
    """

    action: str
    kernel: str
    dtype: str
    m: int
    k: int
    n: int
    batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step of one rank.

    Attributes:
        rank, stage: whose it is.
        actions: the executed or lowered list, as text.
        calls: communication in the order it is started.
        products: how often each shape ran.
        flops: executed FLOPs by kernel.
        memory_bytes: by memory class of report.metrics, what cannot be counted in tensors
            ("reserved") left out.
        peak_bytes: the fullest moment, all these classes together.
    """

    rank: int
    stage: int
    actions: tuple[str, ...]
    calls: tuple[Call, ...]
    products: Mapping[Product, int]
    flops: Mapping[str, float]
    memory_bytes: Mapping[str, int]
    peak_bytes: int
    notes: tuple[str, ...] = field(default=())

    def to_data(self) -> dict[str, Any]:
        """Returns plain data; lists of calls and products are summed up by kind."""
        traffic: dict[str, dict[str, float]] = {}
        for call in self.calls:
            entry = traffic.setdefault(call.collective, {"calls": 0, "bytes": 0})
            entry["calls"] += 1
            entry["bytes"] += call.nbytes
        return {
            "rank": self.rank,
            "stage": self.stage,
            "actions": len(self.actions),
            "traffic": traffic,
            "flops": dict(self.flops),
            "memory_bytes": dict(self.memory_bytes),
            "peak_bytes": self.peak_bytes,
            "notes": list(self.notes),
        }
