"""From a plan's history to its Measurement and trace."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from flopwright.executor.launch.request import (
    RunRequest,
    measurement_file,
    trace_file,
    write_json,
)
from flopwright.executor.measure.fingerprint import fingerprint
from flopwright.executor.measure.memory import fullest_by_stage
from flopwright.executor.measure.protocol import StepTimes, noise_floor, summarise
from flopwright.executor.measure.rank_times import link_times, rank_metrics
from flopwright.executor.measure.rates import rates
from flopwright.executor.measure.timers import StepTrace, without_waiting
from flopwright.executor.parallel.groups import gather_bytes
from flopwright.executor.train.rounds import History
from flopwright.executor.train.trial import Trial
from flopwright.plan.mesh import Mesh
from flopwright.report.attribution import exposed_time
from flopwright.report.metrics import TIME_CLASSES, Measurement, StepMetrics
from flopwright.report.trace import Trace, chrome_trace


def launch_noise_floor(request: RunRequest, times_s: Sequence[float]) -> float | None:
    """Returns the noise floor of a launch: over entries that ran the same plan, the largest."""
    by_plan: dict[str, list[float]] = {}
    for entry, time_s in zip(request.entries, times_s, strict=True):
        key = entry.plan.parallel.content_hash() + entry.plan.scenario_hash
        by_plan.setdefault(key, []).append(time_s)
    floors = [f for f in map(noise_floor, by_plan.values()) if f is not None]
    return max(floors, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """What ranks held in the metered step.

    Attributes:
        by_stage: bytes by class of each stage's fullest rank.
        expert_rows: by rank, rows at its experts over what even routing gives; empty where
            no experts stand on other ranks.
    """

    by_stage: tuple[dict[str, int], ...]
    expert_rows: tuple[float, ...]


def gather_memory(trial: Trial) -> HeldMemory:
    """Returns what all ranks held; collective over all ranks."""
    plan, stage = trial.plan, trial.groups.coordinates["pp"]
    mine = json.dumps([stage, trial.memory, trial.expert_rows]).encode()
    ranks = [json.loads(d) for d in gather_bytes(mine, trial.groups.world, trial.device)]
    return HeldMemory(
        by_stage=fullest_by_stage([(int(s), classes) for s, classes, _ in ranks], plan.pp),
        expert_rows=tuple(float(rows) for *_, rows in ranks) if plan.ep * plan.etp > 1 else (),
    )


def time_by_class(
    traces: Sequence[tuple[StepTrace, ...]], mesh: Mesh, step_time_s: float
) -> dict[str, float]:
    """Returns seconds by time class on the critical rank; they sum to `step_time_s`.

    The critical rank is the one that waits least. Classes are means over the traced steps,
    scaled from their mean duration to `step_time_s`.
    """
    totals = [dict.fromkeys(TIME_CLASSES, 0.0) for _ in range(mesh.plan.world_size)]
    duration_s = 0.0
    for steps in traces:
        longest = max(s.duration_s for s in steps)
        duration_s += longest
        for rank, step in enumerate(without_waiting(steps, mesh)):
            for cls, seconds in exposed_time(step.events, rank, longest).items():
                totals[rank][cls] += seconds
    critical = min(totals, key=lambda classes: classes["idle"])
    scale = step_time_s / duration_s
    return {cls: seconds * scale for cls, seconds in critical.items() if seconds > 0}


def make_measurement(
    trial: Trial,
    request: RunRequest,
    history: History,
    times: StepTimes,
    memory: HeldMemory,
    held_out: float | None,
    floor: float | None,
) -> Measurement:
    """Returns the record of one plan's run."""
    body = {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan_name": trial.entry.name,
        "plan": trial.entry.plan.to_data(),
        "metrics": _metrics(trial, history, times, memory.by_stage),
        "step_time_p10_s": times.p10_s,
        "step_time_p90_s": times.p90_s,
        "step_time_samples_s": times.samples_s,
        "discarded_steps": times.discarded_steps,
        "fingerprint": fingerprint(trial.plan.world_size, trial.device.type),
        "losses": tuple(history.losses),
        "held_out_loss": held_out,
        "noise_floor": floor,
        "mismatch": request.mismatch,
        "ranks": rank_metrics(history.traces, trial.mesh),
        "links": link_times(history.traces, trial.mesh),
        "expert_rows": memory.expert_rows,
    }
    unnamed = Measurement(id="", **body)
    digest = hashlib.sha256(unnamed.model_dump_json().encode()).hexdigest()
    return unnamed.model_copy(update={"id": digest[:16]})


def _metrics(
    trial: Trial, history: History, times: StepTimes, memory_bytes: tuple[dict[str, int], ...]
) -> StepMetrics:
    step_time_s = times.step_time_s
    scenario, world = trial.entry.plan.scenario, trial.plan.world_size
    speed = rates(scenario, world, step_time_s, history.sequences)
    return StepMetrics(
        step_time_s=step_time_s,
        tokens_per_s=speed.tokens_per_s,
        tokens_per_s_per_gpu=speed.tokens_per_s_per_gpu,
        model_flops_per_s_per_gpu=speed.model_flops_per_s_per_gpu,
        mfu=speed.mfu,
        time_s=time_by_class(tuple(history.traces), trial.mesh, step_time_s),
        memory_bytes=memory_bytes,
    )


def typical_trace(traces: Sequence[tuple[StepTrace, ...]], step_time_s: float) -> Trace:
    """Returns the events of all ranks in the traced step whose duration is nearest."""
    steps = min(traces, key=lambda t: abs(max(s.duration_s for s in t) - step_time_s))
    origin = min(s.began_s for s in steps)
    return tuple(
        e._replace(start_s=e.start_s + s.began_s - origin, end_s=e.end_s + s.began_s - origin)
        for s in steps
        for e in s.events
    )


def write_measurement(out_dir: Path, measurement: Measurement, history: History) -> None:
    """Writes an entry's Measurement and Chrome trace."""
    name, step_time_s = measurement.plan_name, measurement.metrics.step_time_s
    events = typical_trace(tuple(history.traces), step_time_s)
    data = chrome_trace(events, world_size=measurement.fingerprint.world_size)
    write_json(out_dir / trace_file(name), data)
    write_json(out_dir / measurement_file(name), measurement.to_data())


def step_times(history: History) -> StepTimes:
    """Returns the summary of a plan's rounds; every step that is not kept counts as discarded."""
    times = summarise(history.rounds)
    discarded = len(history.losses) - len(times.samples_s)  # steps taken back were timed too
    return replace(times, discarded_steps=max(0, discarded))
