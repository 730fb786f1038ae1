"""What each rank was busy with, and each link, from the ranks' traces of timed steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from flopwright.executor.measure.timers import StepTrace, partner_group, without_waiting
from flopwright.plan.mesh import Mesh
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.report.attribution import busy_by_rank
from flopwright.report.metrics import LinkTime, RankMetrics
from flopwright.report.trace import TraceEvent

_Key = tuple[str, tuple[int, ...]]


def rank_metrics(traces: Sequence[Sequence[StepTrace]], mesh: Mesh) -> tuple[RankMetrics, ...]:
    """Returns each rank's busy seconds by time class: medians over steps, waiting cut off.

    Args:
        traces: the ranks' traces of each step, on one machine's clock.
    """
    steps = [_busy(steps, mesh) for steps in traces]
    return tuple(
        RankMetrics(
            rank=rank,
            stage=mesh.coordinates(rank)["pp"],
            time_s=_medians([step.get(rank, {}) for step in steps]),
        )
        for rank in range(mesh.plan.world_size)
    )


def link_times(traces: Sequence[Sequence[StepTrace]], mesh: Mesh) -> tuple[LinkTime, ...]:
    """Returns the seconds of all traffic between the same ranks: medians over steps.

    Of a collective the member counts that it took longest; a message counts at its receiver.
    """
    steps = [_links(steps, mesh) for steps in traces]
    keys = dict.fromkeys(key for step in steps for key in step)
    out = []
    for cls, ranks in keys:
        found = [step[cls, ranks] for step in steps if (cls, ranks) in step]
        columns = [median(column) for column in zip(*found, strict=True)]
        out.append(
            LinkTime(cls=cls, ranks=ranks, seconds=columns[0], nbytes=columns[1], count=columns[2])
        )
    return tuple(out)


def _busy(steps: Sequence[StepTrace], mesh: Mesh) -> dict[int, dict[str, float]]:
    return busy_by_rank(e for step in without_waiting(steps, mesh) for e in step.events)


def _medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for step in steps for name in step)
    return {name: median(step.get(name, 0.0) for step in steps) for name in names}


def _links(steps: Sequence[StepTrace], mesh: Mesh) -> dict[_Key, tuple[float, float, float]]:
    """Returns (seconds, bytes, messages) of one step by link."""
    by_rank: dict[_Key, dict[int, list[TraceEvent]]] = {}
    for step in without_waiting(steps, mesh):
        for event in step.events:
            key = _link_of(event, mesh)
            if key is not None:
                by_rank.setdefault(key, {}).setdefault(event.rank, []).append(event)
    totals = {
        key: max(
            (sum(e.end_s - e.start_s for e in own), float(sum(e.nbytes for e in own)), len(own))
            for own in ranks.values()
        )
        for key, ranks in by_rank.items()
    }
    return {k: (seconds, nbytes, float(count)) for k, (seconds, nbytes, count) in totals.items()}


def _link_of(event: TraceEvent, mesh: Mesh) -> _Key | None:
    """Returns a message's (sender, receiver) or a collective's group; None of anything else."""
    if event.cls != "pp_comm":
        group = partner_group(event, mesh)
        return None if group is None or len(group) < 2 else (event.cls, group)
    if not event.name.startswith("RECV_"):
        return None
    plan = mesh.plan
    chunk = int(event.name.partition("(")[2].split(",")[0])
    sent_from = chunk + (-1 if event.name.startswith("RECV_F") else 1)
    away = stage_of_chunk(plan, sent_from) - stage_of_chunk(plan, chunk)
    return event.cls, (event.rank + away * plan.dp * plan.cp * plan.tp, event.rank)
