"""A step's times as a trace: what each rank did when, split into time classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flopwright.ops import Array
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.report.trace import Trace, TraceEvent
from flopwright.simulator.training.program import NUM_CHUNK_FAMILIES, Family, Op, Program
from flopwright.simulator.training.replay import Timeline
from flopwright.simulator.training.stages import Classes, PipelineCosts

# Order of the classes inside an action: what is computed again comes before the backward.
_ORDER = (
    "recompute",
    "forward",
    "backward",
    "optimizer",
    "tp_comm",
    "cp_comm",
    "ep_comm",
    "dp_comm",
    "offload",
    "host",
)
_COMM = frozenset({"tp_comm", "cp_comm", "ep_comm", "dp_comm"})
_EXCHANGE = "ep_comm"
# Classes in which a rank computes: what a slow GPU takes longer for.
COMPUTE_CLASSES = frozenset({"forward", "backward", "recompute", "optimizer"})
_Parts = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """When the entries of a program ran in one replica, each (entries,).

    Attributes:
        worked_s, exchange_s: when an action's own work ended and its exchange with other
            replicas began; not a number where the two were not told apart.
    """

    start_s: Array
    end_s: Array
    worked_s: Array | None = None
    exchange_s: Array | None = None


def step_trace(
    program: Program,
    timeline: Timeline,
    costs: PipelineCosts,
    column: int = 0,
    only_stage: int | None = None,
) -> Trace:
    """Returns the events of one step of candidate `column`; rank is the pipeline stage.

    With `only_stage` the events of that stage alone.
    """
    times = RankTimes(start_s=timeline.start_s, end_s=timeline.end_s)
    return replica_trace(program, times, costs, column, only_stage=only_stage)


def replica_trace(
    program: Program,
    times: RankTimes,
    costs: PipelineCosts,
    column: int = 0,
    *,
    only_stage: int | None = None,
    rank_of: Callable[[int], int] = int,
) -> Trace:
    """Returns the events of one replica's step, by start.

    A transfer between stages stands on the receiver's comm stream from when its link takes
    it to when it has arrived. What takes no time is left out.

    Args:
        rank_of: stage -> the rank that its events are of.
    """
    maker = _Maker(program, times, costs, column)
    events: list[TraceEvent] = []
    for i, (code, action) in enumerate(zip(program.codes, program.actions, strict=True)):
        if only_stage is None or only_stage in (code.stage, action.peer):
            events.extend(maker.of(i))
    events.extend(maker.norm())
    wanted = (e for e in events if only_stage is None or e.rank == only_stage)
    named = (e._replace(rank=rank_of(e.rank)) for e in wanted)
    return tuple(sorted(named, key=lambda e: (e.start_s, e.rank)))


class _Maker:
    """Events of one replica's entries; their rank is the stage."""

    def __init__(
        self, program: Program, times: RankTimes, costs: PipelineCosts, column: int
    ) -> None:
        self._program, self._times = program, times
        self._parts = _parts_by_row(program, costs, column)
        self._send_bytes = costs.send_bytes[:, column].astype(int).tolist()
        self._norm_s = float(costs.end.norm_s[column])

    def of(self, i: int) -> Iterator[TraceEvent]:
        """Yields the events of entry `i`; a pair's stand at its second half."""
        code, action = self._program.codes[i], self._program.actions[i]
        stage = code.stage
        start, end = float(self._times.start_s[i]), float(self._times.end_s[i])
        if end <= start or code.op in (Op.RECEIVE, Op.FIRST):
            return
        if code.op == Op.LANE:
            yield self._lane(stage, action, start, end)
        elif code.op == Op.SECOND:
            yield from self._pair(i, start, end)
        else:
            yield from self._alone(i, stage, action, start, end)

    def norm(self) -> Iterator[TraceEvent]:
        """Yields the summing of the gradient norm, which all ranks do at once."""
        steps = self._program.steps
        if self._norm_s > 0 and steps:
            begin = float(min(self._times.start_s[i] for i in steps))
            for stage in range(self._program.num_stages):
                yield TraceEvent(stage, "comm", "NORM", "dp_comm", begin - self._norm_s, begin, 8)

    def _lane(self, stage: int, action: Action, start: float, end: float) -> TraceEvent:
        if action.peer >= 0:
            name = _receive_name(action)
            hop = action.chunk - (action.kind is ActionKind.SEND_BACKWARD)
            nbytes = self._send_bytes[hop]
            return TraceEvent(action.peer, "comm", name, "pp_comm", start, end, nbytes)
        if action.kind in {ActionKind.OFFLOAD, ActionKind.FETCH}:
            return TraceEvent(stage, "copy", str(action), "offload", start, end)
        return TraceEvent(stage, "comm", str(action), "dp_comm", start, end)

    def _alone(
        self, i: int, stage: int, action: Action, start: float, end: float
    ) -> Iterator[TraceEvent]:
        """Yields an action's classes one after the other, its own work stretched to what it took.

        What waiting for the other replicas of an exchange took is left out: it is idle time.
        """
        code = self._program.codes[i]
        parts = self._parts[code.row]
        worked = self._at(self._times.worked_s, i)
        if math.isnan(worked):
            exchange = min(parts.get(_EXCHANGE, 0.0), end - start)
            own = {k: v for k, v in parts.items() if k != _EXCHANGE}
            whole = _stretched([own], end - start - exchange)[0] | {_EXCHANGE: exchange}
            yield from _slices(stage, str(action), whole, start)
            return
        traded = "dp_comm" if code.op == Op.STEP else _EXCHANGE
        own = {k: v for k, v in parts.items() if k != traded}
        yield from _slices(stage, str(action), _stretched([own], worked - start)[0], start)
        begin = self._at(self._times.exchange_s, i)
        yield from _slices(stage, str(action), {traded: end - begin}, begin)

    def _pair(self, i: int, start: float, end: float) -> Iterator[TraceEvent]:
        """Yields the work of both halves, one after the other, and their exchanges beside it."""
        program, code = self._program, self._program.codes[i]
        rows = program.pairs[code.row - program.num_rows]
        halves = [(program.actions[k], self._parts[r]) for k, r in
                  zip((code.partner, i), rows, strict=True)]  # fmt: skip
        exchange = sum(parts.get(_EXCHANGE, 0.0) for _, parts in halves)
        total = sum(sum(parts.values()) for _, parts in halves) - exchange
        work = min(total, end - start) if exchange else end - start
        length = min(exchange, end - start)
        worked = self._at(self._times.worked_s, i)
        if not math.isnan(worked):
            work, length = worked - start, end - self._at(self._times.exchange_s, i)
        at = start
        alone = [{k: v for k, v in parts.items() if k != _EXCHANGE} for _, parts in halves]
        for (action, _), own in zip(halves, _stretched(alone, work), strict=True):
            yield from _slices(code.stage, str(action), own, at)
            at += sum(own.values())
        name = " ".join(str(action) for action, _ in halves)
        yield from _slices(code.stage, name, {_EXCHANGE: length}, end - length)

    def _at(self, values: Array | None, i: int) -> float:
        return math.nan if values is None else float(values[i])


def _stretched(halves: Sequence[_Parts], seconds: float) -> list[_Parts]:
    """Returns own classes so that together they take `seconds`: what is computed takes more.

    What computes nothing keeps its time, unless there is nothing else.
    """
    computed = sum(v for parts in halves for k, v in parts.items() if k in COMPUTE_CLASSES)
    still = sum(v for parts in halves for k, v in parts.items() if k not in COMPUTE_CLASSES)
    if computed > 0 and seconds >= still:
        more, rest = (seconds - still) / computed, 1.0
    else:
        more = rest = seconds / max(computed + still, 1e-300)
    return [
        {k: v * (more if k in COMPUTE_CLASSES else rest) for k, v in parts.items()}
        for parts in halves
    ]


def _receive_name(action: Action) -> str:
    forward = action.kind is ActionKind.SEND_FORWARD
    kind = ActionKind.RECV_FORWARD if forward else ActionKind.RECV_BACKWARD
    chunk = action.chunk + (1 if forward else -1)
    return str(Action(kind, chunk, action.microbatch))


def _slices(stage: int, name: str, parts: _Parts, start_s: float) -> Iterator[TraceEvent]:
    """Yields the classes one after the other."""
    for cls in _ORDER:
        seconds = parts.get(cls, 0.0)
        if seconds <= 0:
            continue
        stream = "comm" if cls in _COMM else "copy" if cls == "offload" else "compute"
        yield TraceEvent(stage, stream, name, cls, start_s, start_s + seconds)
        start_s += seconds


def _parts_by_row(program: Program, costs: PipelineCosts, column: int) -> list[_Parts]:
    """Returns seconds by class of every row of the table of durations that is no pair."""
    chunks, stages = program.num_chunks, program.num_stages
    out: list[_Parts] = [{} for _ in range(NUM_CHUNK_FAMILIES * chunks + 2 * stages)]

    def by_chunk(classes: Classes) -> list[_Parts]:
        return [{k: float(v[c, column]) for k, v in classes.items()} for c in range(chunks)]

    weight = costs.weight_s[:, column]
    rows = zip(by_chunk(costs.forward), by_chunk(costs.backward), weight, strict=True)
    for c, (forward, backward, weight_s) in enumerate(rows):
        first = {**backward, "backward": backward.get("backward", 0.0) - float(weight_s)}
        for family, parts in (
            (Family.FORWARD, forward),
            (Family.BACKWARD, backward),
            (Family.BACKWARD_REST, {**backward, "recompute": 0.0}),
            (Family.INPUT, first),
            (Family.INPUT_REST, {**first, "recompute": 0.0}),
            (Family.WEIGHT, {"backward": float(weight_s)}),
            (Family.RECOMPUTE, {"recompute": backward.get("recompute", 0.0)}),
        ):
            out[family * chunks + c] = parts
    end = costs.end
    for stage in range(stages):
        out[NUM_CHUNK_FAMILIES * chunks + stage] = {"dp_comm": float(end.reduce_s[stage, column])}
        out[NUM_CHUNK_FAMILIES * chunks + stages + stage] = {
            "optimizer": float(end.update_s[stage, column]),
            "dp_comm": float(end.gather_s[stage, column]),
            "offload": float(end.offload_s[stage, column]),
            "host": float(np.asarray(end.host_s)),
        }
    return out
