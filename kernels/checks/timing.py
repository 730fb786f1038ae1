"""Times of contenders, alone on their device, beside the least time that the card allows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from flopwright.kernels.checks.contenders import Case, Maker, chosen
from flopwright.kernels.libraries import LIBRARIES, missing

_CACHE_BYTES: Final = 256 * 2**20  # written between calls, so that none finds its inputs in L2
_WARMUP: Final = 3
_BUDGET_S: Final = {"cuda": 0.5, "cpu": 0.03}  # a CPU shows that contenders run, no more
_REPEATS: Final = 30


@dataclass(frozen=True, slots=True)
class Floor:
    """What a card can do at most: FLOP/s in the inputs' dtype and bytes/s of its memory."""

    flops_per_s: float
    bytes_per_s: float

    def seconds(self, flops: float, nbytes: float) -> float:
        """Returns the time below which no kernel of this work can stay."""
        return max(flops / self.flops_per_s, nbytes / self.bytes_per_s)


def seconds(call: Callable[[], Any], device: torch.device) -> list[float]:
    """Returns the seconds of calls after a warm-up, at least three within the budget."""
    budget_s = _BUDGET_S[device.type]
    for _ in range(_WARMUP):
        call()
    if device.type != "cuda":
        found: list[float] = []
        deadline = time.perf_counter() + budget_s
        while len(found) < 3 or (time.perf_counter() < deadline and len(found) < _REPEATS):
            start = time.perf_counter()
            call()
            found.append(time.perf_counter() - start)
        return found
    scratch = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    marks: list[tuple[Any, Any]] = []
    deadline = time.perf_counter() + budget_s
    while len(marks) < 3 or (time.perf_counter() < deadline and len(marks) < _REPEATS):
        scratch.zero_()
        mark: Any = torch.cuda.Event
        begin, end = mark(enable_timing=True), mark(enable_timing=True)
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
        end.synchronize()
    return [float(begin.elapsed_time(end)) * 1e-3 for begin, end in marks]


def _peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """Returns the memory that a call takes beyond what stands before it."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def time_case(case: Case, device: torch.device, floor: Floor | None) -> list[dict[str, Any]]:
    """Returns a row for each contender: seconds forward and back, and shares of the floor."""
    leaves = [t for t in case.inputs if t.requires_grad]
    rows = []
    for name, run in case.contenders.items():
        row: dict[str, Any] = {"op": case.op, "shape": case.shape, "kernel": name}
        try:
            with chosen(run):  # gradients are made outside of the function
                row |= _time_contender(case, run, leaves, device, floor)
        except Exception as error:  # reported; the others are timed
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        rows.append(row)
    return rows


def _time_contender(
    case: Case, run: Callable[..., Tensor], leaves: list[Tensor], device: torch.device,
    floor: Floor | None,
) -> dict[str, Any]:  # fmt: skip
    with torch.no_grad():
        forward = statistics.median(seconds(lambda: run(*case.inputs), device))
        found: dict[str, Any] = {"forward_s": forward}
    found["forward_peak_bytes"] = _peak_bytes(lambda: run(*case.inputs), device)
    if case.differentiable:
        out = run(*case.inputs)
        grad = torch.ones_like(out)

        def both() -> None:
            torch.autograd.grad(run(*case.inputs), leaves, grad)

        found["both_s"] = statistics.median(seconds(both, device))
        found["both_peak_bytes"] = _peak_bytes(both, device)
    if floor is not None:
        found["forward_of_floor"] = floor.seconds(*case.work(False)) / forward
        if case.differentiable:
            work = [floor.seconds(*case.work(back)) for back in (False, True)]
            found["both_of_floor"] = sum(work) / found["both_s"]
    return found


def time_all(
    maker: Maker, makers: Any, floor: Floor | None, deadline: float
) -> Iterator[dict[str, Any]]:
    """Yields the rows of every case until the deadline (of time.monotonic)."""
    for make in makers:
        for case in make(maker):
            if time.monotonic() > deadline:
                return
            yield from time_case(case, maker.device, floor)


def choices(rows: list[dict[str, Any]], when: str) -> dict[str, dict[str, str]]:
    """Returns by op which of our own and the library's kernel is the quicker, and why.

    Over an op's shapes the times of forward and backward add up. Where a library's kernel is
    known but was not timed, the choice is our own and the reason says why it was not.
    """
    found = {}
    for op in {r["op"] for r in rows}:
        total: dict[str, float] = {}
        for r in rows:
            if r["op"] == op and "error" not in r and r["kernel"] in {"triton", "library"}:
                total[r["kernel"]] = total.get(r["kernel"], 0.0) + r.get("both_s", r["forward_s"])
        failed = [str(r["error"]) for r in rows
                  if r["op"] == op and r["kernel"] == "library" and "error" in r]  # fmt: skip
        if len(total) == 2 and not failed:
            best = min(total, key=lambda k: total[k])
            other = max(total.values()) / total[best]
            reason = f"{other:.2f} times as fast as the other, forward and backward, {when}"
            found[op] = {"kernel": best, "reason": reason}
        elif op in LIBRARIES and "triton" in total:
            why = missing(op) or (failed[0] if failed else "no library's kernel was timed")
            found[op] = {"kernel": "triton", "reason": f"{why}, {when}"}
    return found
