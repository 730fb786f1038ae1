"""Collectives between the local ranks, over the payloads that training sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.measure.probe_links import ranks_per_node
from flopwright.executor.measure.probe_timing import Clock, Ranks, Samples, choose_repeats, spread
from flopwright.executor.measure.probe_units import Unit
from flopwright.report.probe import CollectivePoint, ProbePart

CollectiveName = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"
]
_BUSY_ROWS, _BUSY_WIDTH, _BUSY_S = 512, 384, 1.5e-3
SIZES: Final = (4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Groups of `size` neighbours, or (spans) of one rank of each node."""

    size: int
    spans: bool
    stride: int = 1


def collective_units(ranks: Ranks, sizes: tuple[int, ...], share: float) -> list[Unit]:
    """Returns a unit for each collective, payload and group: pairs, a node, across nodes, all.

    Payloads are those of CommTable: the whole tensor for all-reduce, all-gather (output),
    reduce-scatter (input) and broadcast; for all-to-all and send_recv what leaves one rank
    in total (its own part of an exchange stays). All groups of a layout run at the same time.

    Args:
        ranks: at least two; every rank makes the same list (it makes the process groups).
        share: of the probe's time, split evenly over the units.
    """
    plan = [
        (layout, name, nbytes)
        for layout in _layouts(ranks.size, ranks_per_node(ranks.size))
        for name in get_args(CollectiveName)
        for nbytes in sizes
        if name != "send_recv" or layout.size == 2
    ]
    groups: dict[_Layout, Any] = {}
    for layout, *_ in plan:
        if layout not in groups:
            groups[layout] = _my_group(ranks, layout)
    return [
        _unit(ranks, layout, name, nbytes, groups[layout], share / len(plan))
        for layout, name, nbytes in plan
    ]


def _unit(ranks: Ranks, layout: _Layout, name: str, nbytes: int, group: Any, share: float) -> Unit:
    where = " across nodes" if layout.spans else ""
    text = f"{name} of {nbytes // 1024} KiB between {layout.size}{where}"

    def run(seconds: float) -> ProbePart:
        call = _call(name, group, layout.size, nbytes, ranks.device)
        samples, waits = _time_together(call, group, layout, ranks, seconds)
        point = _point(layout, name, nbytes, samples)
        if ranks.device.type == "cpu":
            point = point.model_copy(update={"waiting_s": spread(waits).mean_s})
        return ProbePart(collectives=(point,))

    return Unit(text, text, run, share)


def _point(layout: _Layout, name: str, nbytes: int, samples: Samples) -> CollectivePoint:
    found = spread(samples / 2 if name == "send_recv" else samples)  # there and back
    return CollectivePoint.model_validate(
        {
            "collective": name,
            "ranks": layout.size,
            "spans": layout.spans,
            "nbytes": float(nbytes),
            "seconds": found.median_s,
            "seconds_min": found.min_s,
            "seconds_p90": found.p90_s,
            "seconds_mean": found.mean_s,
            "repeats": samples.size,
        }
    )


def _layouts(world: int, per_node: int) -> list[_Layout]:
    nodes, found = world // per_node, []
    if per_node % 2 == 0:
        found.append(_Layout(2, spans=False))
    if per_node > 2 or (per_node == world and world != 2):
        found.append(_Layout(per_node, spans=False))
    if nodes > 1:
        if nodes % 2 == 0 and nodes > 2:
            found.append(_Layout(2, spans=True, stride=per_node))
        if per_node > 1:
            found.append(_Layout(nodes, spans=True, stride=per_node))
        found.append(_Layout(world, spans=True))
    return found


def _my_group(ranks: Ranks, layout: _Layout) -> Any:
    """Returns this rank's group; collective."""
    if layout.size == ranks.size:
        return dist.group.WORLD
    mine = None
    for members in _members(ranks.size, layout):
        handle = dist.new_group(members)
        if ranks.rank in members:
            mine = handle
    return mine


def _members(world: int, layout: _Layout) -> list[list[int]]:
    """Returns the groups of a layout; together they hold every rank once."""
    block, step = layout.size * layout.stride, layout.stride
    return [
        [start + offset + i * step for i in range(layout.size)]
        for start in range(0, world, block)
        for offset in range(step)
    ]


def _call(
    name: str, group: Any, size: int, nbytes: int, device: torch.device
) -> Callable[[], None]:
    """Returns a function that runs the collective once in this rank's group."""
    count = max(size, nbytes // 4 // size * size)
    whole = torch.ones(count, device=device)
    part = torch.ones(count // size, device=device)
    if name == "all_reduce":
        return lambda: _run(dist.all_reduce, whole, group=group)
    if name == "all_gather":
        return lambda: _run(dist.all_gather_single, whole, part, group=group)
    if name == "reduce_scatter":
        return lambda: _run(dist.reduce_scatter_single, part, whole, group=group)
    if name == "all_to_all":
        kept_too = torch.ones(whole.numel() // (size - 1) * size, device=device)
        out = torch.empty_like(kept_too)
        return lambda: _run(dist.all_to_all_single, out, kept_too, group=group)
    if name == "broadcast":
        first = dist.get_global_rank(group, 0)
        return lambda: _run(dist.broadcast, whole, first, group=group)
    return _ping_pong(whole, group)


def _run(collective: Callable[..., Any], *tensors: Any, group: Any) -> None:
    collective(*tensors, group=group)


def _ping_pong(tensor: Tensor, group: Any) -> Callable[[], None]:
    index = dist.get_rank(group)
    other = dist.get_global_rank(group, 1 - index)

    def call() -> None:
        if index == 0:
            dist.send(tensor, other, group=group)
            dist.recv(tensor, other, group=group)
        else:
            dist.recv(tensor, other, group=group)
            dist.send(tensor, other, group=group)

    return call


def _busy(device: torch.device) -> Callable[[], None] | None:
    """Returns about a millisecond of a layer's work on a CPU, None on a GPU."""
    if device.type == "cuda":
        return None
    x, w = torch.ones(_BUSY_ROWS, _BUSY_WIDTH), torch.ones(_BUSY_WIDTH, _BUSY_WIDTH)

    def busy() -> None:
        torch.nn.functional.silu(x @ w).mul(x).sum()

    return busy


def _time_together(
    call: Callable[[], None], group: Any, layout: _Layout, ranks: Ranks, seconds: float
) -> tuple[Samples, Samples]:
    """Returns seconds from the last rank's start to the last rank's end, by repeat and group.

    And what ranks waited for the last one, the mean over them.

    A collective cannot finish before its last partner starts: what came before is that
    partner's lateness, not the collective's time. On CPUs ranks compute between two calls, as
    they do in a step: processes that only wait for each other answer several times as fast.
    """
    clock, busy = Clock(ranks.device), _busy(ranks.device)
    call()
    clock.wait()
    ranks.together()
    began = time.perf_counter()
    call()
    clock.wait()
    once_s = ranks.agree(time.perf_counter() - began)
    between_s = once_s if busy is None else _BUSY_S
    repeats = choose_repeats(once_s + between_s, seconds, 7, 100)
    spans = np.empty((repeats, 2))
    for i in range(repeats):
        if busy is None:
            dist.barrier(group=group)
        else:
            busy()
        clock.wait()
        start = time.perf_counter()
        call()
        clock.wait()
        spans[i] = start, time.perf_counter()
    order = [rank for members in _members(ranks.size, layout) for rank in members]
    by_rank = ranks.gather(spans)[order].reshape(-1, layout.size, repeats, 2)
    last = by_rank[..., 0].max(1)
    return (by_rank[..., 1].max(1) - last).ravel(), (last - by_rank[..., 0].mean(1)).ravel()
