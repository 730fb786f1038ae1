"""Collectives between the local ranks, over the payloads that training sends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.measure.probe_timing import Clock, Ranks, Samples, choose_repeats, spread
from flopwright.report.probe import CollectivePoint

CollectiveName = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast"
]
SIZES: Final = (4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20)


def probe_collectives(
    ranks: Ranks,
    seconds: float,
    progress: Callable[[str], None],
    sizes: tuple[int, ...] = SIZES,
) -> list[CollectivePoint]:
    """Returns a point for each collective, payload and group size (2 and all ranks).

    Payloads are those of CommTable: the whole tensor for all-reduce, all-gather (output),
    reduce-scatter (input) and broadcast; for all-to-all and send_recv what leaves one rank
    in total (its own part of an exchange stays). All groups of a size run at the same time.

    Args:
        ranks: the ranks that probe; fewer than two give no points.
        seconds: time to spend, split evenly over the points.
    """
    if ranks.size < 2:
        return []
    plan = [
        (size, name, nbytes)
        for size in _group_sizes(ranks.size)
        for name in get_args(CollectiveName)
        for nbytes in sizes
        if name != "send_recv" or size == 2
    ]
    groups = {size: _my_group(ranks, size) for size in {p[0] for p in plan}}
    points = []
    for size, name, nbytes in plan:
        progress(f"{name} of {nbytes // 1024} KiB between {size}")
        call = _call(name, groups[size], size, nbytes, ranks.device)
        samples = _time_together(call, groups[size], size, ranks, seconds / len(plan))
        if name == "send_recv":
            samples = samples / 2  # there and back
        found = spread(samples)
        points.append(
            CollectivePoint(
                collective=name,
                ranks=size,
                nbytes=float(nbytes),
                seconds=found.median_s,
                seconds_min=found.min_s,
                seconds_p90=found.p90_s,
            )
        )
    return points


def _group_sizes(world: int) -> Iterator[int]:
    if world % 2 == 0:
        yield 2
    if world != 2:
        yield world


def _my_group(ranks: Ranks, size: int) -> Any:
    """Returns this rank's group of neighbours; collective."""
    if size == ranks.size:
        return dist.group.WORLD
    mine = None
    for start in range(0, ranks.size, size):
        members = list(range(start, start + size))
        handle = dist.new_group(members)
        if ranks.rank in members:
            mine = handle
    return mine


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


def _time_together(
    call: Callable[[], None], group: Any, size: int, ranks: Ranks, seconds: float
) -> Samples:
    """Returns seconds from the last rank's start to the last rank's end, by repeat and group.

    A collective cannot finish before its last partner starts: what came before is that
    partner's lateness, not the collective's time.
    """
    clock = Clock(ranks.device)
    call()
    clock.wait()
    ranks.together()
    began = time.perf_counter()
    call()
    clock.wait()
    once_s = ranks.agree(time.perf_counter() - began)
    repeats = choose_repeats(1.5 * once_s, seconds, 5, 100)
    spans = np.empty((repeats, 2))
    for i in range(repeats):
        dist.barrier(group=group)
        clock.wait()
        start = time.perf_counter()
        call()
        clock.wait()
        spans[i] = start, time.perf_counter()
    by_rank = ranks.gather(spans).reshape(-1, size, repeats, 2)
    return np.asarray((by_rank[..., 1].max(1) - by_rank[..., 0].max(1)).ravel())
