"""When each action of a step began and ended, on this rank, in the time classes of the report.

An action inside another one cuts it: the outer action's slices and the inner one never
overlap, so that an all-to-all inside a forward pass is not counted as compute. On GPUs the
marks are CUDA events, read once a step has ended; on CPUs they are the monotonic clock,
which all processes of a machine share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from flopwright.plan.mesh import Mesh
from flopwright.report.trace import TraceEvent

# Which group of the mesh an action's partners are in, by time class; and the exceptions.
_GROUP_OF_CLASS: Final = {
    "tp_comm": "tp",
    "cp_comm": "cp",
    "ep_comm": "ep",
    "pp_comm": "pp",
    "dp_comm": "dp_cp",
}
WORLD_ACTIONS: Final = frozenset({"clip_norm"})
_EXPERT_CUT_ACTIONS: Final = ("all_gather:experts", "reduce_scatter:experts", "etp_counts")
_Key = tuple[tuple[int, ...], str, int]


class Slice(NamedTuple):
    """A piece of an action between two marks (see `ActionTimer`)."""

    name: str
    cls: str
    start: Any
    end: Any
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One rank's step: when it began on the machine's clock, how long it took, its events."""

    began_s: float
    duration_s: float
    events: tuple[TraceEvent, ...]


@dataclass(slots=True)
class ActionTimer:
    """Records the actions of one step at a time."""

    rank: int
    device: torch.device
    _slices: list[Slice] = field(default_factory=list)
    _open: list[tuple[str, str, Any, int]] = field(default_factory=list)
    _first: Any = None
    _began_s: float = 0.0

    def start_step(self) -> None:
        """Forgets what was recorded and sets the step's beginning."""
        self._slices.clear()
        self._open.clear()
        self._began_s = time.perf_counter()
        self._first = self._mark()

    @contextmanager
    def action(self, name: str, cls: str, nbytes: int = 0) -> Iterator[None]:
        """Records what runs inside as time of class `cls`; may be nested."""
        self.begin(name, cls, nbytes)
        try:
            yield
        finally:
            self.end()

    def begin(self, name: str, cls: str, nbytes: int = 0) -> None:
        """Opens an action; the one it stands in pauses until `end`."""
        now = self._mark()
        self._close_slice(now)
        self._open.append((name, cls, now, nbytes))

    def end(self) -> None:
        """Closes the innermost action; the one around it goes on."""
        now = self._mark()
        self._close_slice(now)
        self._open.pop()
        if self._open:
            name, cls, _, _ = self._open[-1]
            self._open[-1] = (name, cls, now, 0)

    def unfinished(self) -> tuple[int, str, str] | None:
        """Returns the action at work: its number in the step, name and class; None between two.

        On GPUs it is the first one that the device has not ended. Another thread may ask.
        """
        slices, running = self._slices[:], self._open[-1:]
        if self.device.type == "cuda":
            for number, one in enumerate(slices):
                if not one.end.query():
                    return number, one.name, one.cls
        return (len(slices), running[0][0], running[0][1]) if running else None

    def finish_step(self) -> StepTrace:
        """Returns the step's events, seconds since its beginning; waits for the GPU."""
        assert not self._open, "an action is still open"
        last = self._mark()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return StepTrace(
            began_s=self._began_s,
            duration_s=self._seconds(last),
            events=tuple(
                TraceEvent(
                    rank=self.rank,
                    stream="comm" if s.cls in _GROUP_OF_CLASS else "compute",
                    name=s.name,
                    cls=s.cls,
                    start_s=self._seconds(s.start),
                    end_s=self._seconds(s.end),
                    nbytes=s.nbytes,
                )
                for s in self._slices
            ),
        )

    def _close_slice(self, now: Any) -> None:
        if self._open:
            name, cls, start, nbytes = self._open[-1]
            self._slices.append(Slice(name, cls, start, now, nbytes))

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, mark: Any) -> float:
        if self.device.type != "cuda":
            return float(mark - self._first)
        return float(self._first.elapsed_time(mark)) * 1e-3


def without_waiting(steps: Sequence[StepTrace], mesh: Mesh) -> list[StepTrace]:
    """Returns the ranks' traces of one step with waiting for a partner cut off.

    A receive or a collective cannot move data before its last partner has arrived: the time
    before that is the partner's lateness, and counts as idle. Partners are found by group,
    action name and how often it came before; the clock is the machine's, so this holds for
    ranks of one machine.
    """
    origin = min(s.began_s for s in steps)
    keys = [_partner_keys(step.events, mesh) for step in steps]
    ready: dict[_Key, float] = {}
    for step, step_keys in zip(steps, keys, strict=True):
        for event, key in zip(step.events, step_keys, strict=True):
            if key is not None:
                begin = step.began_s - origin + event.start_s
                ready[key] = max(ready.get(key, 0.0), begin)
    return [_clipped(s, k, ready, origin) for s, k in zip(steps, keys, strict=True)]


def _partner_keys(events: Sequence[TraceEvent], mesh: Mesh) -> list[_Key | None]:
    """Returns what identifies each communication event among its partners: group, name, count."""
    seen: dict[str, int] = {}
    keys: list[_Key | None] = []
    for event in events:
        if event.cls not in _GROUP_OF_CLASS:
            keys.append(None)
            continue
        seen[event.name] = seen.get(event.name, -1) + 1
        group = partner_group(event, mesh)
        assert group is not None, "communication is between somebody"
        keys.append((group, _shared_name(event.name), seen[event.name]))
    return keys


def partner_group(event: TraceEvent, mesh: Mesh) -> tuple[int, ...] | None:
    """Returns the ranks among which an event's communication is; None of other events."""
    if event.cls not in _GROUP_OF_CLASS:
        return None
    return mesh.group_of(_group_name(event), event.rank)


def _group_name(event: TraceEvent) -> str:
    if event.name in WORLD_ACTIONS:
        return "world"
    if event.name.startswith(_EXPERT_CUT_ACTIONS):
        return "etp"
    return _GROUP_OF_CLASS[event.cls]


def _shared_name(name: str) -> str:
    """Returns the message's name from either side: RECV_F(1,0) takes what SEND_F(0,0) sent."""
    for kind, shift in (("RECV_F", -1), ("RECV_B", 1)):
        if name.startswith(kind + "("):
            chunk, microbatch = name[len(kind) + 1 : -1].split(",")
            return f"SEND{kind[4:]}({int(chunk) + shift},{microbatch})"
    return name


def _clipped(
    step: StepTrace, keys: Sequence[_Key | None], ready: Mapping[_Key, float], origin: float
) -> StepTrace:
    shift = step.began_s - origin
    events = []
    for event, key in zip(step.events, keys, strict=True):
        start = event.start_s
        if key is not None and not event.name.startswith("SEND"):
            start = min(max(start, ready[key] - shift), event.end_s)
        events.append(event._replace(start_s=start))
    return StepTrace(step.began_s, step.duration_s, tuple(events))
