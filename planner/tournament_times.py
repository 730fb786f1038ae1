"""Times of plans that took turns: what is the plan's and what was the machine's at the moment.

All plans of a launch take turns in rounds, so whatever else the machine does falls on a whole
round. The median of turn (round r, plan p) is taken as

    log seconds_rp = round_r + plan_p + noise_rp

and fitted by least squares that let outliers count less (Huber). Plans that left the race early
are then compared with the others in the rounds that both were in, not with quieter ones.

A process that starts anew lays its memory out anew, and a plan may be faster in one launch than
in the next for as long as it lives: noise that more turns of the launch do not average away.
`launch_scatter` says how much of it there is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Huber's bound in deviations, and deviation over median size for normal noise.
_HUBER: Final = 1.345
_NORMAL: Final = 1.4826
_ITERATIONS: Final = 30
# Turns scatter at least so much (log) on the quietest machine: no fit is perfect by chance.
_LEAST_SCATTER: Final = 0.002
# Scatter that is assumed before any was seen, and how many turns that is worth.
_PRIOR_SCATTER: Final = 0.05
_PRIOR_TURNS: Final = 4.0
# How far a launch moves a plan (log, standard deviation) before several were seen, and how many
# differences that is worth. A plan and its twin then differ by 14 %; by 10 to 25 % they did in
# launches on shared processors, and by 2 to 5 % on quiet ones.
PRIOR_LAUNCH: Final = 0.10
_PRIOR_LAUNCHES: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTime:
    """One plan's turn in one round of one launch: the median of its timed steps."""

    launch: int
    round: int
    plan: str
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanTime:
    """What the turns say of one plan.

    Attributes:
        step_s: seconds of a step, at the pace of the middle round.
        log_std: standard deviation of its logarithm against the other plans', the luck of the
            launches included where `paired_times` was told of it.
        turns: turns it was taken from.
    """

    plan: str
    step_s: float
    log_std: float
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """All plans' times, and how turns scatter around them (log)."""

    plans: Mapping[str, PlanTime]
    scatter_log: float

    def ratio(self, plan: str, other: str) -> float:
        """Returns how many times as long a step of `plan` takes as one of `other`."""
        return self.plans[plan].step_s / self.plans[other].step_s

    def ratio_log_std(self, plan: str, other: str) -> float:
        """Returns the standard deviation of the ratio's logarithm."""
        return math.hypot(self.plans[plan].log_std, self.plans[other].log_std)

    def fastest(self, among: Iterable[str]) -> str:
        """Returns the plan of `among` with the shortest step."""
        return min(among, key=lambda name: (self.plans[name].step_s, name))


def kept_turns(turns: Sequence[TurnTime]) -> list[TurnTime]:
    """Returns the turns without each launch's first round, in which caches and pages are cold.

    A plan that has nothing but its first turn keeps it: it says more than nothing.
    """
    later = {t.plan for t in turns if t.round > 0}
    return [t for t in turns if t.round > 0 or t.plan not in later]


def paired_times(
    turns: Sequence[TurnTime], launch_log: float = 0.0, twin: tuple[str, str] | None = None
) -> Times:
    """Returns the plans' times from their turns, warm-up already left out (`kept_turns`).

    Args:
        turns: of one launch or several.
        launch_log: how far a launch moves a plan (log, standard deviation). Launches then count
            about equally, however many turns they had.
        twin: (plan, its second name): both are told as the plan, each with its own luck.
    """
    assert turns, "times of no turns"
    own = [twin[0] if twin and t.plan == twin[1] else t.plan for t in turns]
    names = list(dict.fromkeys(own))
    rounds = list(dict.fromkeys((t.launch, t.round) for t in turns))
    design = np.zeros((len(turns), len(rounds) + len(names)))
    for row, (turn, name) in enumerate(zip(turns, own, strict=True)):
        design[row, rounds.index((turn.launch, turn.round))] = 1.0
        design[row, len(rounds) + names.index(name)] = 1.0
    seen = np.log([t.step_s for t in turns])
    parts, weights = _robust(design, seen, _launch_weights(turns, launch_log))
    scatter = _scatter(seen - design @ parts, design)
    paces, plans = parts[: len(rounds)], parts[len(rounds) :]
    # Only differences between plans are known; a shift of all goes with the rounds.
    middle = float(np.median(plans))
    pace = median((paces + middle).tolist())
    spread = _spread(weights, turns, own, scatter, launch_log)
    return Times(
        plans={
            name: PlanTime(
                plan=name,
                step_s=math.exp(plans[i] - middle + pace),
                log_std=spread[name],
                turns=own.count(name),
            )
            for i, name in enumerate(names)
        },
        scatter_log=scatter,
    )


def launch_scatter(turns: Sequence[TurnTime], twin: tuple[str, str] | None = None) -> float:
    """Returns how far a launch moves a plan: the standard deviation of the logarithm.

    What is seen of it is how a plan and its twin differ within a launch, and how differences
    between plans change from launch to launch, less what turns scatter; with `PRIOR_LAUNCH` as
    a few differences more.

    Args:
        turns: without warm-up (`kept_turns`).
        twin: (plan, its second name), where one ran twice.
    """
    rows: list[tuple[int, str, float, float]] = []
    for launch in dict.fromkeys(t.launch for t in turns):
        times = _launch_times(tuple(t for t in turns if t.launch == launch))
        for name, found in times.plans.items():
            same = twin[0] if twin and name == twin[1] else name
            rows.append((launch, same, math.log(found.step_s), found.log_std))
    launches = list(dict.fromkeys(r[0] for r in rows))
    names = list(dict.fromkeys(r[1] for r in rows))
    design = np.zeros((len(rows), len(launches) + len(names)))
    for i, (launch, name, _, _) in enumerate(rows):
        design[i, launches.index(launch)] = design[i, len(launches) + names.index(name)] = 1.0
    seen = np.array([r[2] for r in rows])
    left = seen - design @ np.linalg.lstsq(design, seen, rcond=None)[0]
    free = len(rows) - int(np.linalg.matrix_rank(design)) if rows else 0
    turned = free * float(np.mean([r[3] ** 2 for r in rows])) if rows else 0.0
    squares = _PRIOR_LAUNCHES * PRIOR_LAUNCH**2 + max(0.0, float((left**2).sum()) - turned)
    return math.sqrt(squares / (_PRIOR_LAUNCHES + free))


@lru_cache(maxsize=16)
def _launch_times(turns: tuple[TurnTime, ...]) -> Times:
    """Returns the times of one launch; a referee asks for those that are over again and again."""
    return paired_times(turns)


def _launch_weights(turns: Sequence[TurnTime], launch_log: float) -> Array:
    """Returns what a turn counts: n turns of a launch vary together by launch_log."""
    count = Counter((t.launch, t.plan) for t in turns)
    more = (launch_log / _PRIOR_SCATTER) ** 2
    return np.array([1.0 / (1.0 + more * count[t.launch, t.plan]) for t in turns])


def _robust(design: Array, seen: Array, counts: Array) -> tuple[Array, Array]:
    """Returns the parts of a robust fit (the shortest of all equal ones) and the weights.

    The weights are those of outliers; `counts` are the turns' own, which multiply them.
    """
    weights = np.ones(len(seen))
    parts: Array = np.zeros(design.shape[1])
    for _ in range(_ITERATIONS):
        weighed = (design * (weights * counts)[:, None]).T
        found = np.asarray(np.linalg.lstsq(weighed @ design, weighed @ seen, rcond=1e-11)[0])
        left = seen - design @ found
        scale = max(_NORMAL * float(np.median(np.abs(left))), _LEAST_SCATTER)
        weights = np.minimum(1.0, _HUBER * scale / np.maximum(np.abs(left), 1e-12))
        done = float(np.abs(found - parts).max()) < 1e-9
        parts = found
        if done:
            break
    return parts, weights


def _scatter(left: Array, design: Array) -> float:
    """Returns how turns scatter (log), drawn toward what is usual where there are few."""
    free = len(left) - int(np.linalg.matrix_rank(design))
    own = _NORMAL * float(np.median(np.abs(left))) * math.sqrt(len(left) / max(1, free))
    squares = _PRIOR_TURNS * _PRIOR_SCATTER**2 + max(0, free) * own**2
    return max(_LEAST_SCATTER, math.sqrt(squares / (_PRIOR_TURNS + max(0, free))))


def _spread(
    weights: Array,
    turns: Sequence[TurnTime],
    own: Sequence[str],
    scatter: float,
    launch_log: float,
) -> dict[str, float]:
    """Returns each plan's deviation: of its turns, and of its luck in each launch."""
    sums: dict[str, dict[tuple[int, str], float]] = {name: {} for name in own}
    for weight, turn, name in zip(weights, turns, own, strict=True):
        key = (turn.launch, turn.plan)
        sums[name][key] = sums[name].get(key, 0.0) + float(weight)
    return {
        name: sum(1.0 / (launch_log**2 + scatter**2 / w) for w in by.values()) ** -0.5
        for name, by in sums.items()
    }
