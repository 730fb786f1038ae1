"""A run's figures while it goes on: two JSONL files always, and the sinks that were asked for.

steps.jsonl    one line a step: loss, norm, rate, time, tokens a second, MFU, the busiest
               expert; and what else the step has (memory, logits)
rounds.jsonl   one line a plan's turn: its median, the machine's sentinel, and of its last
               timed step the seconds by class, what travelled, each layer's balance
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from flopwright.executor.launch.request import ROUNDS_FILE, STEPS_FILE
from flopwright.executor.launch.resume import cut_records
from flopwright.executor.measure.communication import travelled
from flopwright.executor.measure.rates import rates
from flopwright.executor.measure.sinks import Sink
from flopwright.plan.file import PlanFile
from flopwright.plan.mesh import Mesh
from flopwright.report.attribution import exposed_time

if TYPE_CHECKING:
    from flopwright.executor.train.collect import StepRow


class RunLog:
    """Rank 0's running record."""

    def __init__(self, out_dir: Path, sinks: Sequence[Sink] = ()) -> None:
        self._out_dir, self._sinks = out_dir, tuple(sinks)
        self._open()

    def _open(self) -> None:
        self._steps = (self._out_dir / STEPS_FILE).open("a", encoding="utf-8")
        self._rounds = (self._out_dir / ROUNDS_FILE).open("a", encoding="utf-8")

    def cut(self, step: int, steps_per_round: int) -> None:
        """Takes back the lines of step `step` and of those after it; sinks keep theirs."""
        for file in (self._steps, self._rounds):
            file.close()
        cut_records(self._out_dir, step, steps_per_round)
        self._open()

    def turn(
        self,
        name: str,
        plan: PlanFile,
        number: int,
        rows: Sequence[StepRow],
        sentinel_s: float,
    ) -> None:
        """Writes a plan's finished turn of round `number`."""
        for row in rows:
            data = {"plan": name, "step": row.step, "round": number, **step_data(row, plan)}
            self._steps.write(json.dumps(data) + "\n")
            figures = _figures(data)
            for sink in self._sinks:
                sink.scalars(name, row.step, figures)
        data = {
            "round": number,
            "plan": name,
            "median_step_s": median(r.step_time_s for r in rows),
            "sentinel_s": sentinel_s,
            **turn_data(rows, Mesh(plan.parallel)),
        }
        self._rounds.write(json.dumps(data) + "\n")
        for file in (self._steps, self._rounds):
            file.flush()

    def close(self) -> None:
        """Closes files and sinks."""
        for file in (self._steps, self._rounds):
            file.close()
        for sink in self._sinks:
            sink.close()


def step_data(row: StepRow, plan: PlanFile) -> dict[str, Any]:
    """Returns a step's line but for where it stands: seconds, bytes, tokens and FLOP/s."""
    speed = rates(plan.scenario, plan.parallel.world_size, row.step_time_s, row.sequences)
    data: dict[str, Any] = {
        "loss": row.loss,
        "gradient_norm": row.gradient_norm,
        "learning_rate": row.learning_rate,
        "step_time_s": row.step_time_s,
        "timed": row.timed,
        "tokens_per_s": speed.tokens_per_s,
        "mfu": speed.mfu,
    }
    if row.memory_bytes:
        data["peak_memory_bytes"] = sum(row.memory_bytes.values())
        data["memory_bytes"] = row.memory_bytes
    if row.logits is not None:
        data["max_logit"], data["clipped_heads"] = row.logits
    if row.balance:
        data["expert_max_over_mean"] = max(b.max_over_mean for b in row.balance.values())
    if plan.scenario.workload.batch_ramp is not None:
        data["sequences"] = row.sequences
    if row.sources:
        data["sources"] = row.sources
    return data


def turn_data(rows: Sequence[StepRow], mesh: Mesh) -> dict[str, Any]:
    """Returns what the last timed step of a turn shows beyond its time.

    Seconds by class are those exposed on the slowest rank, its waiting for others included.
    """
    row = ([r for r in rows if r.timed] or list(rows))[-1]
    rank, slowest = max(enumerate(row.traces), key=lambda item: item[1].duration_s)
    classes = exposed_time(slowest.events, rank, slowest.duration_s)
    data: dict[str, Any] = {
        "time_s": {cls: s for cls, s in classes.items() if s > 0},
        "travelled": {n: t.rounded() for n, t in travelled(row.traces, mesh).items()},
    }
    if row.balance:
        data["expert_loads"] = {str(layer): b._asdict() for layer, b in row.balance.items()}
    return data


def _figures(data: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a step's line, records taken apart."""
    found = {n: float(v) for n, v in data.items() if isinstance(v, (int, float)) and n != "step"}
    for name, record in data.items():
        if isinstance(record, dict):
            found |= {f"{name}/{key}": float(v) for key, v in record.items()}
    return found
