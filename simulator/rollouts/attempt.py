"""An attempt of the reference loop, and a queue of them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import ClassVar, Self

from flopwright.simulator.rollouts import state as st
from flopwright.simulator.rollouts.state import PhaseState


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt; the columns of the state that it is read from have the same names."""

    row: int
    prompt: int
    status: int
    tokens: int
    total: int
    context: int
    seen: int
    turn: int
    turn_end: int
    turn_done: int
    spent: int
    home: int
    place: int
    cached: int
    first: int
    must: int
    ready_s: float
    estimate: float
    verdict_s: float = 0.0
    run: int = 0
    finish_step: int = 0
    pre_left: int = 0
    pre_at: int = 0

    _COLUMNS: ClassVar[tuple[str, ...]] = (
        "prompt", "status", "tokens", "total", "context", "seen", "turn", "turn_end",
        "turn_done", "spent", "home", "place", "cached", "first", "must",
    )  # fmt: skip

    @classmethod
    def read(cls, state: PhaseState, row: int) -> Self:
        """Returns the attempt of a row."""
        values = {n: int(state.rows[row, getattr(st, n.upper())]) for n in cls._COLUMNS}
        times = state.times[row]
        return cls(
            row=row,
            ready_s=float(times[st.READY_S]),
            estimate=float(times[st.ESTIMATE]),
            verdict_s=float(times[st.VERDICT_S]),
            **values,
        )

    def write(self, state: PhaseState) -> None:
        """Writes the attempt back into its row."""
        for name in self._COLUMNS:
            state.rows[self.row, getattr(st, name.upper())] = getattr(self, name)
        state.times[self.row, st.READY_S] = self.ready_s


class Queue:
    """Attempts by key, lower first, ties by age."""

    def __init__(self) -> None:
        self.heap: list[tuple[float, int, Attempt]] = []

    @property
    def head(self) -> Attempt | None:
        """The first; None: nobody waits."""
        return self.heap[0][2] if self.heap else None

    def push(self, key: float, a: Attempt) -> None:
        """Adds an attempt."""
        heapq.heappush(self.heap, (key, a.row, a))

    def pop(self) -> Attempt:
        """Returns the first and takes it out."""
        return heapq.heappop(self.heap)[2]
