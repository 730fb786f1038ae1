"""Reads the operators of torch's process groups: which collective, among whom, how many bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch.distributed as dist
from torch import Tensor

from flopwright.report.rank_step import Call

# Where the payload stands among an operator's arguments.
_INPUT_FIRST: Final = {"allreduce_": "all_reduce", "broadcast_": "broadcast"}
_OUTPUT_FIRST: Final = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allgather_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
}


def read_call(name: str, args: tuple[Any, ...], action: str) -> Call | None:
    """Returns the call that an operator `c10d::name` makes; None for barriers.

    Raises:
        NotImplementedError: an operator that this file does not know.
    """
    if name in {"barrier", "monitored_barrier_"}:
        return None
    group = next(_ranks(a) for a in args if _is_group(a))
    own = dist.get_rank()
    if name in {"send", "recv_"}:
        peer = group[args[2]]
        ends = (own, peer) if name == "send" else (peer, own)
        return Call(action, name.rstrip("_"), ends, _nbytes(args[0]))
    if name in _INPUT_FIRST:
        return Call(action, _INPUT_FIRST[name], group, _nbytes(args[0]))
    if name in _OUTPUT_FIRST:
        collective, place = _OUTPUT_FIRST[name]
        return Call(action, collective, group, _nbytes(args[place]))
    if name == "alltoall_base_":
        return Call(action, "all_to_all", group, _leaving(args[1], args[4], group, own))
    if name == "alltoall_":
        parts = list(args[1])
        kept = group.index(own)
        return Call(action, "all_to_all", group, _nbytes(parts[:kept] + parts[kept + 1 :]))
    raise NotImplementedError(f"the dry run does not know the collective c10d::{name}")


def _leaving(rows: Tensor, splits: list[int], group: tuple[int, ...], own: int) -> int:
    """Returns the bytes that leave the rank: all but its part for itself."""
    total = _nbytes(rows)
    if total == 0:
        return 0
    if not splits:  # even ones
        return total - total // len(group)
    kept = splits[group.index(own)]
    return total - kept * (total // rows.shape[0])


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_nbytes(t) for t in _flat(tensors))


def _flat(tensors: Any) -> Iterable[Tensor]:
    for t in tensors:
        if isinstance(t, Tensor):
            yield t
        else:
            yield from _flat(t)


def _is_group(value: Any) -> bool:
    return type(value).__name__ in {"ScriptObject", "FakeScriptObject", "ProcessGroup"}


def _ranks(value: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
