"""A lowered step in numbers: what each entry does, which row of durations it takes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from flopwright.plan.schedules.actions import Action


class Family(IntEnum):
    """What a row of the table of durations is for (durations.py): by chunk, the last by stage.

    The rests are backwards before which a RECOMPUTE of its own stands in the list.
    """

    FORWARD = 0
    BACKWARD = 1
    BACKWARD_REST = 2
    INPUT = 3
    INPUT_REST = 4
    WEIGHT = 5
    RECOMPUTE = 6
    SEND = 7
    OFFLOAD = 8
    FETCH = 9
    GATHER = 10
    REDUCE = 11
    STEP = 12


NUM_CHUNK_FAMILIES: Final = Family.REDUCE.value


class Op(IntEnum):
    """What an entry does with time.

    COMPUTE holds its stage. FIRST and SECOND are a pair that holds it together. LANE takes a
    link or a copy engine, in the order of asking, and lets the stage go on. RECEIVE waits.
    REDUCE holds the stage once all replicas have come to it; STEP begins when every stage of
    every replica has got there.
    """

    COMPUTE = 0
    FIRST = 1
    SECOND = 2
    LANE = 3
    RECEIVE = 4
    REDUCE = 5
    STEP = 6


class Lane(NamedTuple):
    """What carries out what a stage only starts: "send" to `peer`, "out" or "in", "dp"."""

    kind: str
    stage: int
    peer: int = -1


class Code(NamedTuple):
    """An entry in numbers.

    Attributes:
        stage: whose list it stands in; place: where in that list.
        lane: index into `Program.lanes`; else -1.
        row: of the table of durations; -1 for a receive. Of a pair's second half, the pair's.
        waits_for: indices in the program of the entries that must have ended before.
        partner: of a pair's second half, the index of the first; else -1.
    """

    op: int
    stage: int
    place: int
    lane: int
    row: int
    waits_for: tuple[int, ...]
    partner: int = -1


class Entry(NamedTuple):
    """One action of the program, and whose list it stands in."""

    stage: int
    action: Action


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """All stages' lowered lists as one list in which every entry comes after what it waits for.

    The order inside a stage is that of its list. Optimizer steps wait for every stage's
    reduction: the gradient norm is summed over all ranks.

    Attributes:
        actions: the entries' actions, in their order; codes: the entries in numbers.
        lanes: links and copy engines that entries use.
        pairs: (row of the first, row of the second half) of each row that is a pair; these
            rows come after all others.
        reductions: how many actions reduce a stage's gradients, at least 1.
    """

    num_stages: int
    num_chunks: int
    actions: tuple[Action, ...]
    codes: tuple[Code, ...]
    lanes: tuple[Lane, ...]
    pairs: tuple[tuple[int, int], ...]
    reductions: tuple[int, ...]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The actions, each with the stage whose list it stands in."""
        return tuple(Entry(c.stage, a) for c, a in zip(self.codes, self.actions, strict=True))

    @property
    def num_rows(self) -> int:
        """Rows of the table of durations that are no pairs."""
        return NUM_CHUNK_FAMILIES * self.num_chunks + 2 * self.num_stages

    @property
    def steps(self) -> tuple[int, ...]:
        """Indices of the optimizer steps."""
        return tuple(i for i, c in enumerate(self.codes) if c.op == Op.STEP)

    def waits(self, code: Code) -> tuple[int, ...]:
        """Returns what an entry waits for; a pair begins when both halves can."""
        if code.partner < 0:
            return code.waits_for
        return (*code.waits_for, *self.codes[code.partner].waits_for)
