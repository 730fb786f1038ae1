"""The replayed step as a trace: what each stage did when, split into time classes."""

from __future__ import annotations

from collections.abc import Iterator

from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.report.trace import Trace, TraceEvent
from flopwright.simulator.training.program import Program
from flopwright.simulator.training.replay import Timeline
from flopwright.simulator.training.stages import Classes, PipelineCosts

# Order of the classes inside an action: what is computed again comes before the backward.
_ORDER = (
    "recompute",
    "forward",
    "backward",
    "optimizer",
    "tp_comm",
    "ep_comm",
    "dp_comm",
    "offload",
)
_COMM = frozenset({"tp_comm", "ep_comm", "dp_comm"})


def step_trace(
    program: Program,
    timeline: Timeline,
    costs: PipelineCosts,
    column: int = 0,
    only_stage: int | None = None,
) -> Trace:
    """Returns the events of one step of candidate `column`; rank is the pipeline stage.

    With `only_stage` the events of that stage alone. A transfer between stages stands on the
    receiver's comm stream from when its link takes it to when it has arrived. Sends and
    receives of no length are left out.
    """
    split = _Split(costs, column)
    events: list[TraceEvent] = []
    for i, entry in enumerate(program.entries):
        action = entry.action
        if only_stage is not None and only_stage not in (entry.stage, action.peer):
            continue
        start, end = float(timeline.start_s[i]), float(timeline.end_s[i])
        if action.kind in {ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD}:
            if end > start:
                nbytes = int(costs.send_bytes[column])
                name = _receive_name(action)
                events.append(TraceEvent(action.peer, "comm", name, "pp_comm", start, end, nbytes))
        elif entry.waits_for < 0:
            events.extend(_slices(entry.stage, action, split.of(action, entry.stage), start))
    if norm := float(costs.end.norm_s[column]):
        begin = min(
            float(timeline.start_s[i])
            for i, e in enumerate(program.entries)
            if e.action.kind is ActionKind.OPTIMIZER_STEP
        )
        events.extend(
            TraceEvent(s, "comm", "NORM", "dp_comm", begin - norm, begin, 8)
            for s in range(program.num_stages)
        )
    wanted = (e for e in events if only_stage is None or e.rank == only_stage)
    return tuple(sorted(wanted, key=lambda e: (e.start_s, e.rank)))


def _receive_name(action: Action) -> str:
    forward = action.kind is ActionKind.SEND_FORWARD
    kind = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
    chunk = action.chunk + (1 if forward else -1)
    return str(Action(kind, chunk, action.microbatch))


def _slices(
    stage: int, action: Action, parts: dict[str, float], start_s: float
) -> Iterator[TraceEvent]:
    """Yields an action's classes one after the other."""
    for cls in _ORDER:
        seconds = parts.get(cls, 0.0)
        if seconds <= 0:
            continue
        stream = "comm" if cls in _COMM else "copy" if cls == "offload" else "compute"
        yield TraceEvent(stage, stream, str(action), cls, start_s, start_s + seconds)
        start_s += seconds


class _Split:
    """Seconds by class of each action of one candidate."""

    def __init__(self, costs: PipelineCosts, column: int) -> None:
        def by_chunk(classes: Classes) -> list[dict[str, float]]:
            chunks = costs.pp * costs.vpp
            return [{k: float(v[c, column]) for k, v in classes.items()} for c in range(chunks)]

        end = costs.end
        self._forward, self._backward = by_chunk(costs.forward), by_chunk(costs.backward)
        self._reduce = [{"dp_comm": float(x)} for x in end.reduce_s[:, column]]
        self._step = [
            {"optimizer": float(u), "dp_comm": float(g), "offload": float(o)}
            for u, g, o in zip(
                end.update_s[:, column], end.gather_s[:, column], end.offload_s[:, column],
                strict=True,
            )
        ]  # fmt: skip

    def of(self, action: Action, stage: int) -> dict[str, float]:
        """Returns the classes of an action on a stage."""
        if action.kind is ActionKind.FORWARD:
            return self._forward[action.chunk]
        if action.kind is ActionKind.BACKWARD:
            return self._backward[action.chunk]
        return (self._reduce if action.kind is ActionKind.REDUCE_GRADIENTS else self._step)[stage]
