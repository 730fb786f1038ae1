"""The plans of a launch take turns; rank 0 collects what every rank's steps left behind."""

from __future__ import annotations

import gc
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist

from flopwright.executor.launch.progress import Progress
from flopwright.executor.launch.request import (
    ROUNDS_FILE,
    STEPS_FILE,
    STOP_FILE,
    RunRequest,
)
from flopwright.executor.measure.protocol import WARMUP_ROUNDS, Turn, turns
from flopwright.executor.measure.timers import StepTrace
from flopwright.executor.parallel.groups import Group, gather_bytes
from flopwright.executor.train.trial import StepRecord, Trial
from flopwright.executor.train.watch import Watch
from flopwright.report.trace import TraceEvent

TRACES_KEPT: Final = 64
METERED_STEP: Final = 1  # within the first round, whose times are not kept
_SENTINEL_SIZE: Final = 384
_SENTINEL_REPEATS: Final = 8


@dataclass(slots=True)
class History:
    """What rank 0 knows of one plan.

    Attributes:
        rounds: step times in seconds by round, the slowest rank's.
        traces: of the last steps, one StepTrace a rank.
    """

    rounds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    traces: deque[tuple[StepTrace, ...]] = field(default_factory=lambda: deque(maxlen=TRACES_KEPT))


def run_rounds(
    trials: Sequence[Trial], request: RunRequest, out_dir: Path, say: Progress, watch: Watch
) -> list[History]:
    """Trains all plans in turns and returns their histories (complete on rank 0).

    Rank 0 calls `say` with each plan's progress after its turn. A file named `stop` in the
    run's folder ends the training after the current round.
    """
    world, device = trials[0].groups.world, trials[0].device
    histories = [History() for _ in trials]
    writer = _Writer(out_dir, request, say) if dist.get_rank() == 0 else None
    current = -1
    for turn in turns(len(trials), request.steps, request.steps_per_round):
        if turn.round != current:
            current = turn.round
            with watch.waiting(f"the start of round {current}", world):
                if current > 0 and _asked_to_stop(out_dir, world, device):
                    break
                sentinel_s = _sentinel(world, device)
        trial, history = trials[turn.entry], histories[turn.entry]
        records = _run_turn(trial, turn, watch)
        with watch.waiting(f"what plan '{trial.entry.name}' showed in round {current}", world):
            rows = _collect(trial, records, world, device)
        if writer is not None:
            _remember(history, rows)
            writer.turn(trial.entry.name, turn, rows, sentinel_s)
    if writer is not None:
        writer.close()
    return histories


def _run_turn(trial: Trial, turn: Turn, watch: Watch) -> list[StepRecord]:
    gc.collect()
    with watch.waiting(f"the barrier before step {turn.first_step}", trial.groups.world):
        dist.barrier(group=trial.groups.world.handle)
    metered = min(METERED_STEP, turn.num_steps - 1) if turn.round == 0 else -1
    with watch.steps(trial):
        return [
            trial.run_step(turn.first_step + i, meter_memory=i == metered)
            for i in range(turn.num_steps)
        ]


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step as all ranks saw it.

    Attributes:
        peak_memory_bytes: of the fullest rank; None for steps that it was not metered in.
        logits: under QK-Clip (largest attention logit, heads that were clipped) of the model.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    step_time_s: float
    timed: bool
    peak_memory_bytes: int | None
    traces: tuple[StepTrace, ...]
    logits: tuple[float, int] | None = None


def _collect(
    trial: Trial, records: Sequence[StepRecord], world: Group, device: torch.device
) -> list[StepRow]:
    """Returns the rows of a turn, the same on every rank."""
    losses = torch.zeros(len(records), dtype=torch.float64, device=device)
    for i, record in enumerate(records):
        if record.loss is not None:
            losses[i] = record.loss.double() / trial.plan.dp
    world.sum_(losses)
    mine = [
        sum(trial.memory.values()),
        [_trace_data(r.trace) for r in records],
        [None if r.logits is None else [float(x) for x in r.logits] for r in records],
    ]
    everyone = gather_bytes(json.dumps(mine).encode(), world, device)
    peaks, ranks, logits = zip(*map(json.loads, everyone), strict=True)
    rows = []
    for i, record in enumerate(records):
        traces = tuple(_trace_from(rank[i]) for rank in ranks)
        rows.append(
            StepRow(
                step=record.step,
                loss=float(losses[i]),
                gradient_norm=float(record.gradient_norm),
                learning_rate=record.learning_rate,
                step_time_s=max(t.duration_s for t in traces),
                timed=record.timed,
                peak_memory_bytes=None if record.timed else max(peaks),
                traces=traces,
                logits=_logits([rank[i] for rank in logits], trial.groups.dp_cp.size),
            )
        )
    return rows


def _logits(ranks: Sequence[list[float] | None], replicas: int) -> tuple[float, int] | None:
    """Returns (largest, clipped) over the model; `replicas` ranks each count the same heads."""
    found = [rank for rank in ranks if rank is not None]
    if not found:
        return None
    return max(r[0] for r in found), round(sum(r[1] for r in found) / replicas)


def _trace_data(trace: StepTrace) -> list[Any]:
    return [trace.began_s, trace.duration_s, [list(e) for e in trace.events]]


def _trace_from(data: list[Any]) -> StepTrace:
    began_s, duration_s, events = data
    return StepTrace(began_s, duration_s, tuple(TraceEvent(*e) for e in events))


def _remember(history: History, rows: Sequence[StepRow]) -> None:
    timed = [r for r in rows if r.timed] or list(rows)
    if len(history.rounds) == WARMUP_ROUNDS:
        history.traces.clear()  # only kept steps are attributed
    history.rounds.append([r.step_time_s for r in timed])
    history.losses.extend(r.loss for r in rows)
    history.traces.extend(r.traces for r in timed)


def _asked_to_stop(out_dir: Path, world: Group, device: torch.device) -> bool:
    flag = torch.zeros(1, device=device)
    if dist.get_rank() == 0 and (out_dir / STOP_FILE).exists():
        flag += 1
    return bool(world.sum_(flag) > 0)


def _sentinel(world: Group, device: torch.device) -> float:
    """Returns seconds of a fixed block of matrix products on all ranks at once, the slowest's.

    It does the same work each round: how much it varies is how much the machine does.
    """
    a = torch.ones(_SENTINEL_SIZE, _SENTINEL_SIZE, device=device)
    dist.barrier(group=world.handle)
    begin = time.perf_counter()
    for _ in range(_SENTINEL_REPEATS):
        a = (a @ a) / _SENTINEL_SIZE
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
    if world.size > 1:
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=world.handle)
    return float(seconds)


class _Writer:
    """Rank 0's running record: one line a step, one a turn, one a step for the progress bar."""

    def __init__(self, out_dir: Path, request: RunRequest, say: Progress) -> None:
        self._request = request
        self._say = say
        self._began = time.perf_counter()
        self._done = 0
        self._steps = (out_dir / STEPS_FILE).open("a", encoding="utf-8")
        self._rounds = (out_dir / ROUNDS_FILE).open("a", encoding="utf-8")

    def turn(self, name: str, turn: Turn, rows: Sequence[StepRow], sentinel_s: float) -> None:
        """Writes a finished turn."""
        for row in rows:
            data = {
                "plan": name,
                "step": row.step,
                "round": turn.round,
                "loss": row.loss,
                "gradient_norm": row.gradient_norm,
                "learning_rate": row.learning_rate,
                "step_time_s": row.step_time_s,
                "timed": row.timed,
            }
            if row.peak_memory_bytes is not None:
                data["peak_memory_bytes"] = row.peak_memory_bytes
            if row.logits is not None:
                data["max_logit"], data["clipped_heads"] = row.logits
            self._steps.write(json.dumps(data) + "\n")
        data = {
            "round": turn.round,
            "plan": name,
            "median_step_s": median(r.step_time_s for r in rows),
            "sentinel_s": sentinel_s,
        }
        self._rounds.write(json.dumps(data) + "\n")
        for file in (self._steps, self._rounds):
            file.flush()
        self._say(self._progress_of(name, rows))

    def _progress_of(self, name: str, rows: Sequence[StepRow]) -> dict[str, Any]:
        workload = self._request.entries[0].plan.scenario.workload
        self._done += len(rows)
        total = self._request.steps * len(self._request.entries)
        elapsed_s = time.perf_counter() - self._began
        return {
            "plan": name,
            "step": rows[-1].step + 1,
            "steps": self._request.steps,
            "loss": rows[-1].loss,
            "tokens_per_s": workload.tokens_per_step / rows[-1].step_time_s,
            "eta_s": elapsed_s / self._done * (total - self._done),
        }

    def close(self) -> None:
        """Closes the files."""
        for file in (self._steps, self._rounds):
            file.close()
