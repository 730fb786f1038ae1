"""Timed operators: each kernel's op at a shape, the optimizer, the cost of a call."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

from flopwright.executor.measure.probe_cases import KIND_NAMES, ProbeCase
from flopwright.executor.measure.probe_delta import KERNEL
from flopwright.executor.measure.probe_timing import (
    Clock,
    Ranks,
    Samples,
    spread,
    time_calls,
    time_calls_by_rank,
)
from flopwright.models.optim.adamw.cost import step_cost
from flopwright.ops import OpKind, OpTable, Phase
from flopwright.report.probe import OperatorPoint, ProbePart

OPTIMIZER_NUMEL: Final = (2**14, 2**18, 2**20, 2**22)
_BACKWARD: Final = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


def shape_text(rows: OpTable) -> str:
    """Returns the sides of the first row that are not 1: "512x192x96"."""
    return "x".join(f"{float(c[0, 0]):g}" for c in (rows.m, rows.k, rows.n) if c[0, 0] != 1)


def case_part(case: ProbeCase, clock: Clock, ranks: Ranks, seconds: float) -> ProbePart:
    """Returns a point for each cost row of the case; all ranks call it together."""
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

    by_rank = time_calls_by_rank(call, clock, ranks, seconds=seconds)
    samples = by_rank.reshape(-1, by_rank.shape[-1])
    medians = np.maximum(np.median(by_rank.sum(axis=-1), axis=1), 1e-9)
    return ProbePart(
        operators=tuple(_points(case, samples, with_gradients=bool(inputs))),
        rank_log=tuple(np.log(medians / np.median(medians)).tolist()),
    )


def _points(case: ProbeCase, samples: Samples, *, with_gradients: bool) -> list[OperatorPoint]:
    rows = case.rows
    if not with_gradients:
        return [_point(case.name, rows, i, samples[:, 0]) for i in range(len(rows))]
    backward = [i for i in range(len(rows)) if rows.phase[i] in _BACKWARD]
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
            "kind": KERNEL if rows.kernel[row] == KERNEL else KIND_NAMES[OpKind(rows.kind[row])],
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
            "repeats": samples.size,
        }
    )


def host_floor(clock: Clock, ranks: Ranks) -> ProbePart:
    """Returns the seconds of an op on one element: what any call costs."""
    one = torch.ones(1, device=ranks.device)

    def call() -> list[Any]:
        start = clock.mark()
        torch.add(one, one)
        return [start, clock.mark()]

    samples = time_calls(call, clock, ranks, seconds=0.2, most=2000).ravel()
    return ProbePart(host_floor_s=spread(samples).median_s)


def optimizer_part(numel: int, clock: Clock, ranks: Ranks, seconds: float) -> ProbePart:
    """Returns torch's AdamW in fp32 on one tensor of `numel` weights."""
    weight = torch.nn.Parameter(torch.ones(numel, device=ranks.device))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-3, fused=True)  # as the executor does

    def call() -> list[Any]:
        start = clock.mark()
        optimizer.step()
        return [start, clock.mark()]

    samples = time_calls(call, clock, ranks, seconds=seconds)
    rows = step_cost(numel, weights="fp32", master=None).ops
    return ProbePart(operators=(_point("adamw", rows, 0, samples.ravel()),))
