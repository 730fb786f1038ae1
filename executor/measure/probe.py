"""Measures a machine: rates of the model's ops, memory, collectives, the cost of a call.

Run in the process group of a training launch, or alone. All ranks run every point at the
same time, so that what they share (cores, memory, links) is shared as in training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import torch

from flopwright.executor.measure.probe_cases import KIND_NAMES, ProbeCase
from flopwright.executor.measure.probe_collectives import SIZES, probe_collectives
from flopwright.executor.measure.probe_timing import Clock, Ranks, spread, time_calls
from flopwright.ops import OpKind, OpTable, Phase
from flopwright.report.metrics import Fingerprint
from flopwright.report.probe import OperatorPoint, ProbeReport

# Shares of the time budget; what the operators leave goes to nobody.
_COLLECTIVE_SHARE: Final = 0.35
_OPTIMIZER_SHARE: Final = 0.05
_OPTIMIZER_NUMEL: Final = (2**14, 2**18, 2**20, 2**22)


def run_probe(
    fingerprint: Fingerprint,
    cases: Sequence[ProbeCase],
    *,
    device: torch.device | None = None,
    budget_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
    collective_sizes: tuple[int, ...] = SIZES,
) -> ProbeReport:
    """Returns what this machine does; every rank of the process group calls it together.

    Args:
        fingerprint: of this launch; the calibration will be bound to it.
        cases: from `probe_points.shapes_for` and `grid_cases`; those that are not
            essential are left out once the budget is spent.
        device: where to run; the CPU by default.
        budget_s: seconds to spend, which decides the repeats. Every essential point is run
            at least three times, whatever the budget.
        progress: called on rank 0 with what comes next.
        collective_sizes: payloads in bytes.
    """
    ranks = Ranks(device or torch.device("cpu"))
    clock = Clock(ranks.device)
    tell = progress if progress is not None and ranks.rank == 0 else _silent
    deadline = time.monotonic() + budget_s * (1 - _COLLECTIVE_SHARE * (ranks.size > 1))
    for_operators = (deadline - time.monotonic()) * (1 - _OPTIMIZER_SHARE)
    tell("host floor")
    host_floor_s = _host_floor(clock, ranks)
    tell("optimizer")
    operators = _optimizer_points(clock, ranks, budget_s * _OPTIMIZER_SHARE)
    # Essential shapes first: the budget may end before the others.
    ordered = sorted(cases, key=lambda c: not c.essential)
    for i, case in enumerate(ordered):
        late = ranks.agree(float(time.monotonic() > deadline)) > 0
        if late and not case.essential:
            continue
        tell(f"{case.name} {_shape_text(case.rows)} {case.dtype} ({i + 1} of {len(ordered)})")
        operators += _case_points(case, clock, ranks, for_operators / len(ordered))
    collectives = probe_collectives(ranks, budget_s * _COLLECTIVE_SHARE, tell, collective_sizes)
    return ProbeReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        host_floor_s=host_floor_s,
        operators=tuple(operators),
        collectives=tuple(collectives),
    )


def _silent(_message: str) -> None:
    """Says nothing."""


def _shape_text(rows: OpTable) -> str:
    return "x".join(f"{float(c[0, 0]):g}" for c in (rows.m, rows.k, rows.n) if c[0, 0] != 1)


def _case_points(
    case: ProbeCase, clock: Clock, ranks: Ranks, seconds: float
) -> list[OperatorPoint]:
    """Returns a point for each cost row of the case."""
    prepared = case.prepare(ranks.device)
    inputs = prepared.inputs
    gradient = torch.ones_like(prepared.run()) if inputs else None

    def call() -> list[Any]:
        marks = [clock.mark()]
        out = prepared.run()
        marks.append(clock.mark())
        if inputs:
            torch.autograd.grad(out, inputs, gradient)
            marks.append(clock.mark())
        return marks

    samples = time_calls(call, clock, ranks, seconds=seconds)
    rows = case.rows
    backward = [i for i in range(len(rows)) if rows.phase[i] != Phase.FORWARD]
    points = [_point(case, 0, samples[:, 0])]
    if inputs and backward:
        shares = _shares(rows, backward)
        points += [
            _point(case, i, samples[:, 1] * share)
            for i, share in zip(backward, shares, strict=True)
        ]
    return points


def _shares(rows: OpTable, members: list[int]) -> list[float]:
    """Returns each row's part of a time they share, by FLOPs, by bytes where there are none."""
    weight = rows.flops[members, 0]
    if not weight.any():
        weight = (rows.read_bytes + rows.written_bytes)[members, 0]
    return [float(w) for w in weight / weight.sum()]


def _point(case: ProbeCase, row: int, samples: Any) -> OperatorPoint:
    rows, found = case.rows, spread(samples)
    return OperatorPoint.model_validate(
        {
            "kind": KIND_NAMES[OpKind(rows.kind[row])],
            "name": case.name,
            "dtype": rows.dtype[row],
            "phase": "forward" if rows.phase[row] == Phase.FORWARD else "backward",
            "m": rows.m[row, 0],
            "k": rows.k[row, 0],
            "n": rows.n[row, 0],
            "batch": rows.batch[row, 0],
            "flops": rows.flops[row, 0],
            "moved_bytes": rows.read_bytes[row, 0] + rows.written_bytes[row, 0],
            "seconds": found.median_s,
            "seconds_min": found.min_s,
            "seconds_p90": found.p90_s,
        }
    )


def _host_floor(clock: Clock, ranks: Ranks) -> float:
    """Returns the seconds of an op on one element: what any call costs."""
    one = torch.ones(1, device=ranks.device)

    def call() -> list[Any]:
        start = clock.mark()
        torch.add(one, one)
        return [start, clock.mark()]

    return spread(time_calls(call, clock, ranks, seconds=0.2, most=2000).ravel()).median_s


def _optimizer_points(clock: Clock, ranks: Ranks, seconds: float) -> list[OperatorPoint]:
    """Returns torch's AdamW on one tensor of each size: reads 4 values a weight, writes 3."""
    points = []
    for numel in _OPTIMIZER_NUMEL:
        weight = torch.nn.Parameter(torch.ones(numel, device=ranks.device))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], lr=1e-3)

        def call(optimizer: torch.optim.Optimizer = optimizer) -> list[Any]:
            start = clock.mark()
            optimizer.step()
            return [start, clock.mark()]

        samples = time_calls(call, clock, ranks, seconds=seconds / len(_OPTIMIZER_NUMEL))
        found = spread(samples.ravel())
        points.append(
            OperatorPoint(
                kind="optimizer",
                name="adamw",
                dtype="fp32",
                m=float(numel),
                moved_bytes=7.0 * 4 * numel,
                seconds=found.median_s,
                seconds_min=found.min_s,
                seconds_p90=found.p90_s,
            )
        )
    return points
