"""What every rank's steps left behind, brought together on all ranks after a plan's turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flopwright.executor.data.order import Ordered
from flopwright.executor.measure.loads import Balance, balances
from flopwright.executor.measure.timers import StepTrace
from flopwright.executor.parallel.groups import Group, gather_bytes
from flopwright.executor.train.trial import StepRecord, Trial
from flopwright.report.trace import TraceEvent


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step as all ranks saw it.

    Attributes:
        memory_bytes: of the fullest rank by class; empty for steps that it was not metered in.
        traces: one a rank.
        logits: under QK-Clip (largest attention logit, heads that were clipped) of the model.
        balance: of the experts' loads by layer.
        sequences: of the step, on all ranks; None for the full batch.
        full_batch: whether they are the plan's, and not those of a ramp before it.
        sources: how many of them come from which domain; empty for one text.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    step_time_s: float
    timed: bool
    traces: tuple[StepTrace, ...]
    memory_bytes: dict[str, int] = field(default_factory=dict)
    logits: tuple[float, int] | None = None
    balance: dict[int, Balance] = field(default_factory=dict)
    sequences: int | None = None
    full_batch: bool = True
    sources: dict[str, int] = field(default_factory=dict)


def collect(
    trial: Trial, records: Sequence[StepRecord], world: Group, device: torch.device
) -> list[StepRow]:
    """Returns the rows of a turn, the same on every rank."""
    last_stage = trial.plan.dp * trial.plan.cp * trial.plan.tp  # ranks that know a loss
    losses = torch.zeros(len(records), dtype=torch.float64, device=device)
    for i, record in enumerate(records):
        if record.loss is not None:
            losses[i] = record.loss.double() / last_stage
    world.sum_(losses)
    mine = json.dumps([trial.memory, [_packed(record) for record in records]])
    gathered = gather_bytes(mine.encode(), world, device)
    memories, ranks = zip(*map(json.loads, gathered), strict=True)
    fullest = max(memories, key=lambda classes: sum(classes.values()))
    rows = []
    for i, record in enumerate(records):
        traces = tuple(_trace(rank[i][0]) for rank in ranks)
        rows.append(
            StepRow(
                step=record.step,
                loss=float(losses[i]),
                gradient_norm=float(record.gradient_norm),
                learning_rate=record.learning_rate,
                step_time_s=max(t.duration_s for t in traces),
                timed=record.timed,
                traces=traces,
                memory_bytes=fullest if record.metered else {},
                logits=_logits([rank[i][1] for rank in ranks], trial.groups.dp_cp.size),
                balance=_balance([rank[i][2] for rank in ranks]),
                sequences=record.sequences,
                full_batch=record.sequences == trial.workload.global_batch_size,
                sources=_sources(trial, record.step),
            )
        )
    return rows


def _sources(trial: Trial, step: int) -> dict[str, int]:
    """Returns how many samples of a step come from which domain."""
    data = trial.dataset
    found = data.sources(step) if isinstance(data, Ordered) else {}
    return found if len(found) > 1 else {}


def _packed(record: StepRecord) -> list[Any]:
    trace, logits = record.trace, record.logits
    return [
        [trace.began_s, trace.duration_s, [list(e) for e in trace.events]],
        None if logits is None else [float(x) for x in logits],
        list(balances(record.loads).items()),
    ]


def _trace(data: list[Any]) -> StepTrace:
    began_s, duration_s, events = data
    return StepTrace(began_s, duration_s, tuple(TraceEvent(*e) for e in events))


def _logits(ranks: Sequence[list[float] | None], replicas: int) -> tuple[float, int] | None:
    """Returns (largest, clipped) over the model; `replicas` ranks each count the same heads."""
    found = [rank for rank in ranks if rank is not None]
    if not found:
        return None
    return max(r[0] for r in found), round(sum(r[1] for r in found) / replicas)


def _balance(ranks: Sequence[list[Any]]) -> dict[int, Balance]:
    """Returns the layers of all stages; ranks of a stage have the same."""
    found = {layer: Balance(*balance) for rank in ranks for layer, balance in rank}
    return dict(sorted(found.items()))
