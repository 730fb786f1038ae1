"""Compute and a collective at the same time: what one costs the other.

A rank works on products while a collective of all ranks runs. Each is timed alone, both
together; what the products lose for every second of traffic beside them is the slowdown
that a simulated step charges (Calibration.overlap_slowdown). On GPUs they share SMs and
memory bandwidth, on CPUs the cores.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from flopwright.executor.measure.probe_timing import Clock, Ranks, spread
from flopwright.executor.measure.probe_units import Unit
from flopwright.report.probe import OverlapPoint, ProbePart

OVERLAPPED: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
_NBYTES: Final = 8 * 2**20
# The products take so many times as long as the traffic, which then fits beside them.
_LONGER: Final = 2.5
_SIDE: Final = {"cuda": 4096, "cpu": 384}
_LEAST, _MOST = 5, 60


def overlap_units(ranks: Ranks, share: float) -> list[Unit]:
    """Returns a unit a collective, between all ranks."""
    return [
        Unit(f"overlap {name}", f"{name} beside products", _runs(name, ranks),
             share / len(OVERLAPPED), essential=False, again=False)
        for name in OVERLAPPED
    ]  # fmt: skip


def _runs(name: str, ranks: Ranks) -> Callable[[float], ProbePart]:
    return lambda seconds: ProbePart(overlaps=(_measured(name, ranks, seconds),))


def _measured(name: str, ranks: Ranks, seconds: float) -> OverlapPoint:
    """Returns the point; collective over all ranks."""
    clock, start = Clock(ranks.device), _starter(name, ranks)
    product = _product(ranks.device)
    traffic_s = _seconds(lambda: start().wait(), clock, ranks, 3)
    product_s = _seconds(product, clock, ranks, 3)
    count = int(ranks.agree(float(math.ceil(_LONGER * traffic_s / product_s))))

    def compute() -> None:
        for _ in range(count):
            product()

    def both() -> None:
        work = start()
        compute()
        work.wait()

    once_s = 2 * traffic_s + 2 * count * product_s
    repeats = int(ranks.agree(float(np.clip(seconds / once_s, _LEAST, _MOST))))
    parts = (lambda: start().wait(), compute, both)
    # In turns, so that a machine that changes its pace changes it for all three.
    samples = np.array([[_timed(part, clock, ranks) for part in parts] for _ in range(repeats)])
    alone, computed, together = (spread(samples[:, i]).median_s for i in range(3))
    return OverlapPoint(
        collective=name, ranks=ranks.size, nbytes=float(_NBYTES), comm_s=alone,
        compute_s=computed, both_s=together, repeats=repeats,
    )  # fmt: skip


def _timed(part: Callable[[], Any], clock: Clock, ranks: Ranks) -> float:
    """Returns the slowest rank's seconds."""
    ranks.together()
    clock.wait()
    began = time.perf_counter()
    part()
    clock.wait()
    return float(ranks.gather(np.array([time.perf_counter() - began])).max())


def _seconds(part: Callable[[], Any], clock: Clock, ranks: Ranks, repeats: int) -> float:
    _timed(part, clock, ranks)
    return ranks.agree(float(np.median([_timed(part, clock, ranks) for _ in range(repeats)])))


def _product(device: torch.device) -> Callable[[], None]:
    side = _SIDE[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a = torch.ones(side, side, device=device, dtype=dtype)
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, a, out=out)

    return product


def _starter(name: str, ranks: Ranks) -> Callable[[], Any]:
    """Returns a function that starts the collective and returns what waits for its end."""
    count = _NBYTES // 4 // ranks.size * ranks.size
    whole = torch.ones(count, device=ranks.device)
    part = torch.ones(count // ranks.size, device=ranks.device)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, async_op=True)
    if name == "all_gather":
        return lambda: dist.all_gather_single(whole, part, async_op=True)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, whole, async_op=True)
    out = torch.empty_like(whole)
    return lambda: dist.all_to_all_single(out, whole, async_op=True)
