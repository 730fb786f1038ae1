"""Which rank is slow, and which link: every rank against the others, every pair by itself."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
import torch.distributed as dist

from flopwright.executor.measure.probe_timing import Clock, Ranks
from flopwright.executor.parallel.groups import Group, gather_bytes
from flopwright.report.probe import LinkPoint, ProbePart, RankSpeed

_NBYTES: Final = 4 * 2**20
_REPEATS: Final = 5
# Up to so many ranks every pair is measured; of more, the ring and each rank's partner across.
_ALL_PAIRS: Final = 8


def pairs_of(size: int, per_node: int) -> list[tuple[int, int]]:
    """Returns the pairs of ranks whose links are measured."""
    if size <= _ALL_PAIRS:
        return list(itertools.combinations(range(size), 2))
    ring = [(i, i + 1) for i in range(size - 1)]
    across = [(i, i + per_node) for i in range(size - per_node)] if per_node < size else []
    return sorted({*ring, *across, (0, size - 1)})


def link_points(ranks: Ranks) -> ProbePart:
    """Returns the seconds of a message there and back, halved, for each pair; collective."""
    per_node = ranks_per_node(ranks.size)
    clock, tensor = Clock(ranks.device), torch.ones(_NBYTES // 4, device=ranks.device)
    found = []
    for a, b in pairs_of(ranks.size, per_node):
        ranks.together()
        mine = np.full(1, np.inf)
        if ranks.rank in (a, b):
            _there_and_back(tensor, ranks.rank, a, b)
            spans = []
            for _ in range(_REPEATS):
                clock.wait()
                begin = time.perf_counter()
                _there_and_back(tensor, ranks.rank, a, b)
                clock.wait()
                spans.append((time.perf_counter() - begin) / 2)
            mine[0] = np.median(spans)
        found.append((a, b, float(ranks.gather(mine).min())))
    return ProbePart(
        links=tuple(
            LinkPoint(
                ranks=(a, b),
                within_node=a // per_node == b // per_node,
                nbytes=_NBYTES,
                seconds=seconds,
            )
            for a, b, seconds in found
        )
    )


def _there_and_back(tensor: torch.Tensor, rank: int, a: int, b: int) -> None:
    if rank == a:
        dist.send(tensor, b)
        dist.recv(tensor, b)
    else:
        dist.recv(tensor, a)
        dist.send(tensor, a)


def ranks_per_node(size: int) -> int:
    """Returns the ranks that a launcher put on one node (torchrun's word for it), else all."""
    given = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return given if 0 < given <= size and size % given == 0 else size


def rank_speeds(ranks: Ranks, logs: Sequence[Sequence[float]]) -> tuple[RankSpeed, ...]:
    """Returns how slow every rank was over all operators, and where it stands; collective.

    Args:
        logs: by operator, log of each rank's median over the median of all.
    """
    names = [socket.gethostname()]
    if ranks.size > 1:
        world = Group(tuple(range(ranks.size)), ranks.rank, dist.group.WORLD)
        names = [d.decode() for d in gather_bytes(names[0].encode(), world, ranks.device)]
    if not logs:
        return ()
    slow = np.exp(np.median(np.array(logs), axis=0))
    per_node = ranks_per_node(ranks.size)
    return tuple(
        RankSpeed(rank=i, host=name, local_rank=i % per_node, slowdown=float(slow[i]))
        for i, name in enumerate(names)
    )
