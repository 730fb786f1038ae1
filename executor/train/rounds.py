"""The plans of a launch take turns; rank 0 collects what every rank's steps left behind."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from flopwright.executor.launch.progress import Progress
from flopwright.executor.launch.request import (
    STOP_FILE,
    RunRequest,
    kineto_file,
    read_retired,
)
from flopwright.executor.launch.resume import recorded_losses
from flopwright.executor.measure.log import RunLog
from flopwright.executor.measure.protocol import WARMUP_ROUNDS, Turn, turns
from flopwright.executor.measure.sinks import open_sinks
from flopwright.executor.measure.timers import StepTrace
from flopwright.executor.parallel.groups import Group
from flopwright.executor.train.collect import StepRow, collect
from flopwright.executor.train.guard import refuse_not_finite
from flopwright.executor.train.recovery import Recovery
from flopwright.executor.train.saves import Saves
from flopwright.executor.train.stops import Stops
from flopwright.executor.train.trial import StepRecord, Trial
from flopwright.executor.train.watch import Watch

TRACES_KEPT: Final = 64
METERED_STEP: Final = 1  # within the first round, whose times are not kept
_SENTINEL_SIZE: Final = 384
_SENTINEL_REPEATS: Final = 8


@dataclass(slots=True)
class History:
    """What rank 0 knows of one plan.

    Attributes:
        rounds: step times in seconds by round, the slowest rank's; while a ramp is not at its end
            those of the last round alone.
        ramping: whether the last round had no step of the full batch; sequences: of its last step.
        traces: of the last steps, one StepTrace a rank.
    """

    rounds: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    traces: deque[tuple[StepTrace, ...]] = field(default_factory=lambda: deque(maxlen=TRACES_KEPT))
    ramping: bool = False
    sequences: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Keepers:
    """What looks after a run while it trains."""

    watch: Watch
    saves: Saves
    stops: Stops
    recovery: Recovery


def run_rounds(
    trials: Sequence[Trial], request: RunRequest, out_dir: Path, say: Progress, keepers: Keepers
) -> list[History]:
    """Trains all plans in turns and returns their histories (complete on rank 0).

    Rank 0 calls `say` with each plan's progress after its turn. A file named `stop` in the
    run's folder ends the training after the current round, and from then on plans named in
    `retired.json` take no turns. SIGTERM ends it after the present step (stops.py).
    """
    histories = [History() for _ in trials]
    if dist.get_rank() == 0 and request.resume_step:
        known = recorded_losses(out_dir, [t.entry.name for t in trials])
        for trial, history in zip(trials, histories, strict=True):
            history.losses.extend(known[trial.entry.name])
    writer = _Writer(out_dir, request, say) if dist.get_rank() == 0 else None
    rounds = _Rounds(trials, request, out_dir, keepers, histories, writer)
    begin: int | None = request.resume_step
    while begin is not None:
        begin = rounds.run(begin)
    if writer is not None:
        writer.close()
    return histories


@dataclass(slots=True)
class _Rounds:
    """The turns of a launch from one step on."""

    trials: Sequence[Trial]
    request: RunRequest
    out_dir: Path
    keepers: Keepers
    histories: Sequence[History]
    writer: _Writer | None

    def run(self, begin: int) -> int | None:
        """Takes turns from step `begin` on; returns a step to go back to, None at the end."""
        request, watch = self.request, self.keepers.watch
        world, device = self.trials[0].groups.world, self.trials[0].device
        current, retired, sentinel_s = -1, frozenset[int](), 0.0
        for turn in turns(len(self.trials), request.steps, request.steps_per_round, begin):
            if turn.round != current:
                began, current = current >= 0, turn.round
                with watch.waiting(f"the start of round {current}", world):
                    if began:
                        stop, retired = _asked(self.out_dir, self.trials, device)
                        if stop:
                            break
                    sentinel_s = _sentinel(world, device)
            if turn.entry in retired:
                continue
            back = self._turn(turn, sentinel_s)
            if back is not None:
                return back
            if self.keepers.stops.order is not None:
                break
        return None

    def _turn(self, turn: Turn, sentinel_s: float) -> int | None:
        """Runs a turn and saves what is due; returns a step to go back to, if there is one."""
        trial, history = self.trials[turn.entry], self.histories[turn.entry]
        watch, world = self.keepers.watch, trial.groups.world
        kineto = self.out_dir / kineto_file(trial.entry.name, dist.get_rank())
        profiled = kineto if self.request.kineto_trace else None
        records = _run_turn(trial, turn, self.keepers, profiled)
        if not records:  # told to end before its first step
            return None
        showed = f"what plan '{trial.entry.name}' showed in round {turn.round}"
        with watch.waiting(showed, world):
            rows = collect(trial, records, world, trial.device)
        if self.writer is not None:
            remember(history, rows)
            self.writer.turn(trial, turn, rows, sentinel_s)
        back = self._look(turn.entry, rows, records)
        if back is None:
            with watch.waiting(f"the checkpoint after step {rows[-1].step}", world):
                self.keepers.saves.after_turn(turn.entry, rows[-1].step + 1)
        elif self.writer is not None:
            taken_back = rows[-1].step + 1 - back
            history.losses = history.losses[:back]
            self.writer.take_back(back, taken_back)
        return back

    def _look(
        self, entry: int, rows: Sequence[StepRow], records: Sequence[StepRecord]
    ) -> int | None:
        """Returns a step to go back to where a loss is out of line; ends a run that may not."""
        trial, recovery = self.trials[entry], self.keepers.recovery
        if self.request.checkpoint_every is None:  # not a run that is to be gone on with
            return None
        if not self.request.max_rollbacks:
            refuse_not_finite(trial, rows, records)
            recovery.memories[entry].remember([row.loss for row in rows])
            return None
        bad = recovery.memories[entry].look(rows)
        if bad is None:
            return None
        with self.keepers.watch.waiting("the way back before a loss spike", trial.groups.world):
            return recovery.roll_back(entry, trial, self.keepers.saves, (rows, records, bad))


def _run_turn(
    trial: Trial, turn: Turn, keepers: Keepers, kineto: Path | None = None
) -> list[StepRecord]:
    """Runs a turn, or the steps of it until all are told to end.

    In the first one memory is metered, and the last step written to `kineto`.
    """
    gc.collect()
    watch = keepers.watch
    with watch.waiting(f"the barrier before step {turn.first_step}", trial.groups.world):
        dist.barrier(group=trial.groups.world.handle)
    # behind a ramp it is metered again: more micro-batches may stand at a time
    grown = len(trial.dataset.step_samples(turn.first_step)) > trial.metered_sequences
    first, last = not trial.memory or grown, turn.num_steps - 1
    metered = min(METERED_STEP, last) if first else -1
    records = []
    with watch.steps(trial):
        for i in range(turn.num_steps):
            if not keepers.stops.before_step():
                break
            profiled = kineto if first and i == last else None
            step = turn.first_step + i
            try:
                records.append(trial.run_step(step, meter_memory=i == metered, kineto=profiled))
            except Exception as error:
                error.add_note(f"in step {step} of plan '{trial.entry.name}'")
                raise
    return records


def remember(history: History, rows: Sequence[StepRow]) -> None:
    """Adds a turn's rows to a plan's history."""
    full = [r for r in rows if r.full_batch]
    if not full or history.ramping:  # what smaller batches took is not the plan's step
        history.rounds.clear()
        history.traces.clear()
    history.ramping, history.sequences = not full, rows[-1].sequences
    counted = full or [r for r in rows if r.sequences == rows[-1].sequences]
    timed = [r for r in counted if r.timed] or counted
    if len(history.rounds) == WARMUP_ROUNDS:
        history.traces.clear()  # only kept steps are attributed
    history.rounds.append([r.step_time_s for r in timed])
    history.losses.extend(r.loss for r in rows)
    history.traces.extend(r.traces for r in timed)


def _asked(
    out_dir: Path, trials: Sequence[Trial], device: torch.device
) -> tuple[bool, frozenset[int]]:
    """Returns what rank 0 finds in the run's folder: whether to stop, and who is retired."""
    flags = torch.zeros(1 + len(trials), device=device)
    if dist.get_rank() == 0:
        retired = read_retired(out_dir)
        flags[0] = (out_dir / STOP_FILE).exists()
        flags[1:] = torch.tensor([float(t.entry.name in retired) for t in trials])
    stop, *gone = (trials[0].groups.world.sum_(flags) > 0).tolist()
    return stop or all(gone), frozenset(i for i, out in enumerate(gone) if out)


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
    """Rank 0's running record, and a line for the progress bar."""

    def __init__(self, out_dir: Path, request: RunRequest, say: Progress) -> None:
        self._request = request
        self._say = say
        self._began = time.perf_counter()
        self._done = request.resume_step * len(request.entries)
        self._before = self._done
        self._log = RunLog(out_dir, open_sinks(request.log_to, out_dir))

    def turn(self, trial: Trial, turn: Turn, rows: Sequence[StepRow], sentinel_s: float) -> None:
        """Writes a finished turn."""
        self._log.turn(trial.entry.name, trial.entry.plan, turn.round, rows, sentinel_s)
        self._say(self._progress_of(trial.entry.name, rows))

    def _progress_of(self, name: str, rows: Sequence[StepRow]) -> dict[str, Any]:
        workload = self._request.entries[0].plan.scenario.workload
        sequences = rows[-1].sequences or workload.global_batch_size
        self._done += len(rows)
        total = self._request.steps * len(self._request.entries)
        elapsed_s = time.perf_counter() - self._began
        return {
            "plan": name,
            "step": rows[-1].step + 1,
            "steps": self._request.steps,
            "loss": rows[-1].loss,
            "tokens_per_s": sequences * workload.seq_len / rows[-1].step_time_s,
            "eta_s": elapsed_s / (self._done - self._before) * (total - self._done),
        }

    def take_back(self, step: int, count: int) -> None:
        """Takes back `count` steps that were written, those from `step` on."""
        self._log.cut(step, self._request.steps_per_round)
        self._done -= count

    def close(self) -> None:
        """Closes the log."""
        self._log.close()
