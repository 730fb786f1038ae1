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

from flopwright.executor.measure.fingerprint import fingerprint
from flopwright.executor.measure.probe_cases import KIND_NAMES, ProbeCase
from flopwright.executor.measure.probe_collectives import SIZES, probe_collectives
from flopwright.executor.measure.probe_timing import Clock, Ranks, Samples, spread, time_calls
from flopwright.models.optim.adamw.cost import step_cost
from flopwright.ops import OpKind, OpTable, Phase
from flopwright.plan.file import PlanFile
from flopwright.report.metrics import Fingerprint
from flopwright.report.probe import OperatorPoint, ProbeReport

# Shares of the time budget.
_COLLECTIVE_SHARE: Final = 0.35
_OPTIMIZER_SHARE: Final = 0.05
_BACKWARD: Final = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
_OPTIMIZER_NUMEL: Final = (2**14, 2**18, 2**20, 2**22)


def run_probe(
    device: torch.device,
    plans: Sequence[PlanFile] = (),
    *,
    budget_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
) -> ProbeReport:
    """Returns what this machine does; every rank of the process group calls it together.

    Args:
        device: this rank's device.
        plans: the shapes their models need are measured; a grid that spans the rest always.
        budget_s: seconds to spend, which decides the repeats.
        progress: called on rank 0 with what comes next.
    """
    from flopwright.executor.measure.probe_points import cases_for

    return measure_cases(
        cases_for(plans, device.type),
        fingerprint(Ranks(device).size, device.type),
        device,
        budget_s=budget_s,
        progress=progress,
    )


def measure_cases(
    cases: Sequence[ProbeCase],
    fingerprint: Fingerprint,
    device: torch.device,
    *,
    budget_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
    collective_sizes: tuple[int, ...] = SIZES,
) -> ProbeReport:
    """Returns the report over the given cases; collective, as `run_probe`.

    Args:
        cases: from `probe_points`; those that are not essential are left out once the
            budget is spent, the others are run three times whatever the budget.
        fingerprint: of this launch; the calibration will be bound to it.
        device: this rank's device.
        budget_s: seconds to spend.
        progress: called on rank 0 with what comes next.
        collective_sizes: payloads in bytes.
    """
    ranks, clock = Ranks(device), Clock(device)
    tell = progress if progress is not None and ranks.rank == 0 else _silent
    tell("host floor")
    host_floor_s = _host_floor(clock, ranks)
    tell("optimizer")
    operators = _optimizer_points(clock, ranks, budget_s * _OPTIMIZER_SHARE)
    rest_s = budget_s * (1 - _OPTIMIZER_SHARE)
    collective_s = rest_s * _COLLECTIVE_SHARE if ranks.size > 1 else 0.0
    operators += _timed_cases(cases, clock, ranks, rest_s - collective_s, tell)
    collectives = probe_collectives(ranks, collective_s, tell, collective_sizes)
    return ProbeReport(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        device_memory_bytes=_device_memory(device),
        host_floor_s=host_floor_s,
        operators=tuple(operators),
        collectives=tuple(collectives),
    )


def _timed_cases(
    cases: Sequence[ProbeCase],
    clock: Clock,
    ranks: Ranks,
    seconds: float,
    tell: Callable[[str], None],
) -> list[OperatorPoint]:
    """Returns the cases' points, essential shapes first: the time may end before the rest."""
    deadline = time.monotonic() + seconds
    ordered = sorted(cases, key=lambda c: not c.essential)
    points: list[OperatorPoint] = []
    for i, case in enumerate(ordered):
        late = ranks.agree(float(time.monotonic() > deadline)) > 0
        if late and not case.essential:
            continue
        tell(f"{case.name} {_shape_text(case.rows)} {case.dtype} ({i + 1} of {len(ordered)})")
        points += _case_points(case, clock, ranks, seconds / len(ordered))
    return points


def _device_memory(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(device).total_memory)


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
    backward = [i for i in range(len(rows)) if rows.phase[i] in _BACKWARD]
    if not inputs:
        return [_point(case.name, rows, i, samples[:, 0]) for i in range(len(rows))]
    points = [_point(case.name, rows, 0, samples[:, 0])]
    if backward:
        shares = _shares(rows, backward)
        points += [
            _point(case.name, rows, i, samples[:, 1] * share)
            for i, share in zip(backward, shares, strict=True)
        ]
    return points


def _shares(rows: OpTable, members: list[int]) -> list[float]:
    """Returns each row's part of a time they share, by FLOPs, by bytes where there are none."""
    weight = rows.flops[members, 0]
    if not weight.any():
        weight = (rows.read_bytes + rows.written_bytes)[members, 0]
    return [float(w) for w in weight / weight.sum()]


def _point(name: str, rows: OpTable, row: int, samples: Samples) -> OperatorPoint:
    found = spread(samples)
    return OperatorPoint.model_validate(
        {
            "kind": KIND_NAMES[OpKind(rows.kind[row])],
            "name": name,
            "dtype": rows.dtype[row],
            "phase": "backward" if rows.phase[row] in _BACKWARD else "forward",
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
    """Returns torch's AdamW in fp32 on one tensor of each size."""
    points = []
    for numel in _OPTIMIZER_NUMEL:
        weight = torch.nn.Parameter(torch.ones(numel, device=ranks.device))
        weight.grad = torch.ones_like(weight)
        optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)  # as the executor does

        def call(optimizer: torch.optim.Optimizer = optimizer) -> list[Any]:
            start = clock.mark()
            optimizer.step()
            return [start, clock.mark()]

        samples = time_calls(call, clock, ranks, seconds=seconds / len(_OPTIMIZER_NUMEL))
        rows = step_cost(numel, weights="fp32", master=None).ops
        points.append(_point("adamw", rows, 0, samples.ravel()))
    return points
