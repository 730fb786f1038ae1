"""A probe as a list of units: each is measured, written down, and not measured again.

Rank 0 keeps a journal: a line a finished unit. A probe that was ended goes on where it
stopped; what was measured on another machine or for another request is not taken. Time that
is left once all units are through goes to those that would be wrong by most.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from flopwright.executor.measure.probe_timing import Ranks
from flopwright.report.probe import CollectivePoint, OperatorPoint, ProbePart

Say = Callable[[str], None]
P = TypeVar("P", OperatorPoint, CollectivePoint)

# Of the time of all units, what the first pass over them may take.
_FIRST_PASS: Final = 0.65
_MOST_PASSES: Final = 200


@dataclass(frozen=True, slots=True)
class Unit:
    """One thing to measure; all ranks measure it together.

    Attributes:
        key: its name in the journal; text: what is said of it.
        share: of the time, relative to the others'.
        essential: measured whatever the time; others are left out once it is up.
        again: whether further passes make it surer.
        run: takes seconds, returns what was found (on every rank).
    """

    key: str
    text: str
    run: Callable[[float], ProbePart]
    share: float = 1.0
    essential: bool = True
    again: bool = True


@dataclass(slots=True)
class Journal:
    """Finished units of one probe, as rank 0 wrote them.

    Attributes:
        path: None keeps nothing.
        head: what machine and request they are of.
    """

    path: Path | None
    head: str

    def parts(self) -> dict[str, ProbePart]:
        """Returns what is there by key; a line that was cut short ends it."""
        if self.path is None or not self.path.exists():
            return {}
        found: dict[str, ProbePart] = {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        if not lines or lines[0] != self.head:
            return {}
        for line in lines[1:]:
            try:
                data = json.loads(line)
                found[data["key"]] = ProbePart.model_validate(data["part"])
            except (ValueError, KeyError):
                break
        return found

    def begin(self, parts: dict[str, ProbePart]) -> None:
        """Starts the file anew, with what is already known."""
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [self.head, *(_line(k, p) for k, p in parts.items())]
        self.path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def add(self, key: str, part: ProbePart) -> None:
        """Writes a finished unit down."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(_line(key, part) + "\n")


def _line(key: str, part: ProbePart) -> str:
    return json.dumps({"key": key, "part": part.to_data()})


def run_units(
    units: Sequence[Unit], ranks: Ranks, seconds: float, say: Say, journal: Journal
) -> dict[str, ProbePart]:
    """Returns what was found by key (complete on rank 0); collective.

    Args:
        seconds: for all units together; what the journal has costs none.
        say: called on rank 0 with "3/40 what comes next".
    """
    first = ranks.rank == 0
    found = journal.parts() if first else {}
    if first:
        journal.begin(found)
    done = [ranks.agree(float(u.key in found)) > 0 for u in units]
    left = [u for u, d in zip(units, done, strict=True) if not d]
    deadline = time.monotonic() + seconds * _FIRST_PASS
    total = sum(u.share for u in left) or 1.0
    for unit in left:
        late = ranks.agree(float(time.monotonic() > deadline)) > 0
        if late and not unit.essential:
            continue
        say(f"{len(units) - len(left) + left.index(unit) + 1}/{len(units)} {unit.text}")
        part = unit.run(seconds * _FIRST_PASS * unit.share / total)
        if first:
            found[unit.key] = part
            journal.add(unit.key, part)
    if left:
        rest = seconds * (1 - _FIRST_PASS)
        _again(units, ranks, rest, say, found)
    return found


def _again(
    units: Sequence[Unit], ranks: Ranks, seconds: float, say: Say, found: dict[str, ProbePart]
) -> None:
    """Measures the least certain units once more, until the time is up."""
    deadline = time.monotonic() + seconds
    for unit in _least_certain(units, ranks, found):
        if ranks.agree(float(time.monotonic() > deadline)) > 0:
            return
        say(f"{len(units)}/{len(units)} again: {unit.text}")
        part = unit.run(seconds * _AGAIN_SHARE)
        if ranks.rank == 0:
            found[unit.key] = merged(found[unit.key], part)


_AGAIN_SHARE: Final = 0.02


def _least_certain(
    units: Sequence[Unit], ranks: Ranks, found: dict[str, ProbePart]
) -> Iterator[Unit]:
    """Yields the unit that may be wrong by most seconds a call, as rank 0 sees it."""
    for _ in range(_MOST_PASSES):
        doubt = [_doubt_s(found[u.key]) if u.again and u.key in found else 0.0 for u in units]
        worst = int(ranks.agree(float(np.argmax(doubt))))
        if ranks.agree(float(max(doubt, default=0.0))) <= 0:
            return
        yield units[worst]


def _doubt_s(part: ProbePart) -> float:
    """Returns the standard error of a unit's medians together, in seconds a call."""
    points: list[OperatorPoint | CollectivePoint] = [*part.operators, *part.collectives]
    return sum(
        p.seconds * math.log(p.seconds_p90 / p.seconds_min) / math.sqrt(max(p.repeats, 1))
        for p in points
    )


def merged(one: ProbePart, two: ProbePart) -> ProbePart:
    """Returns two measurements of one unit as one, each weighed by its repeats."""
    return ProbePart(
        operators=tuple(map(_both, one.operators, two.operators)),
        collectives=tuple(map(_both, one.collectives, two.collectives)),
        rank_log=one.rank_log or two.rank_log,
    )


def _both(one: P, two: P) -> P:
    weights = np.array([max(one.repeats, 1), max(two.repeats, 1)], float)

    def mean(name: str) -> float:
        logs = np.log([getattr(one, name), getattr(two, name)])
        return float(np.exp(np.average(logs, weights=weights)))

    update = {name: mean(name) for name in ("seconds", "seconds_p90")}
    update["seconds_min"] = min(one.seconds_min, two.seconds_min)
    update["repeats"] = one.repeats + two.repeats
    if isinstance(one, CollectivePoint) and one.seconds_mean is not None:
        update["seconds_mean"] = mean("seconds_mean")
    return one.model_copy(update=update)
