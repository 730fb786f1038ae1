"""Timing one case: how often, on what clock, and what all ranks saw."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Samples = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds of one call over the repeats; the mean is winsorised at the 90th percentile."""

    median_s: float
    min_s: float
    p90_s: float
    mean_s: float


def spread(samples: Samples) -> Spread:
    """Returns median, minimum and 90th percentile; none is below a nanosecond."""
    kept = np.maximum(samples, 1e-9)
    return Spread(
        median_s=float(np.median(kept)),
        min_s=float(kept.min()),
        p90_s=float(np.quantile(kept, 0.9)),
        mean_s=float(np.minimum(kept, np.quantile(kept, 0.9)).mean()),
    )


@dataclass(frozen=True, slots=True)
class Clock:
    """Marks in time on the device: CUDA events on a GPU, the monotonic clock elsewhere.

    The monotonic clock is one for all processes of a machine, so marks of several ranks
    can be compared on a CPU.
    """

    device: torch.device

    def mark(self) -> Any:
        """Returns now, in the order of the device's work."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        """Returns the seconds between two marks; after `wait` on a GPU."""
        if self.device.type != "cuda":
            return float(end - start)
        return float(start.elapsed_time(end)) * 1e-3

    def wait(self) -> None:
        """Waits until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that probe together; one rank alone needs no process group."""

    device: torch.device

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def rank(self) -> int:
        """This rank's number."""
        return dist.get_rank() if dist.is_initialized() else 0

    def together(self) -> None:
        """Waits for all ranks, so that they load the machine at the same time."""
        if self.size > 1:
            dist.barrier()

    def gather(self, values: Samples) -> Samples:
        """Returns every rank's values, [ranks, ...]; all ranks give the same shape."""
        if self.size == 1:
            return values[None]
        mine = torch.as_tensor(values, dtype=torch.float64, device=self.device)
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine)
        return np.stack([p.cpu().numpy() for p in parts])

    def agree(self, value: float) -> float:
        """Returns rank 0's value on all ranks."""
        if self.size == 1:
            return value
        shared = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(shared, 0)
        return float(shared.item())


def choose_repeats(once_s: float, seconds: float, least: int, most: int) -> int:
    """Returns how many calls of `once_s` fit in `seconds`, between `least` and `most`."""
    return int(np.clip(seconds / max(once_s, 1e-9), least, most))


def time_calls(
    call: Callable[[], list[Any]], clock: Clock, ranks: Ranks, *, seconds: float, most: int = 200
) -> Samples:
    """Returns [repeats over all ranks, intervals] of seconds between the marks of `call`.

    See `time_calls_by_rank`.
    """
    found = time_calls_by_rank(call, clock, ranks, seconds=seconds, most=most)
    return found.reshape(-1, found.shape[-1])


def time_calls_by_rank(
    call: Callable[[], list[Any]], clock: Clock, ranks: Ranks, *, seconds: float, most: int = 200
) -> Samples:
    """Returns [ranks, repeats, intervals] of seconds between the marks of `call`.

    Args:
        call: does the work once and returns its marks; n marks make n - 1 intervals.
        clock: what the marks were taken with.
        ranks: all of them call this together, each until its time is up.
        seconds: time to spend, beside one call to warm up; at least three calls are made.
        most: repeats at most.
    """
    call()
    clock.wait()
    ranks.together()
    deadline = time.monotonic() + seconds
    marks: list[list[Any]] = []
    while len(marks) < 3 or (time.monotonic() < deadline and len(marks) < most):
        marks.append(call())
        clock.wait()
    mine = np.array([[clock.between(a, b) for a, b in itertools.pairwise(row)] for row in marks])
    fewest = int(ranks.gather(np.array([float(len(mine))])).min())
    return ranks.gather(mine[:fewest])
