"""Times of plans that took turns: what is the plan's and what was the machine's at the moment.

All plans of a launch take turns in rounds, so whatever else the machine does falls on a whole
round. The median of turn (round r, plan p) is taken as

    log seconds_rp = round_r + plan_p + noise_rp

and fitted by least squares that let outliers count less (Huber). Plans that left the race early
are then compared with the others in the rounds that both were in, not with quieter ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        log_std: standard deviation of its logarithm against the other plans'.
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


def paired_times(turns: Sequence[TurnTime]) -> Times:
    """Returns the plans' times from their turns, warm-up already left out (`kept_turns`)."""
    assert turns, "times of no turns"
    names = list(dict.fromkeys(t.plan for t in turns))
    rounds = list(dict.fromkeys((t.launch, t.round) for t in turns))
    design = np.zeros((len(turns), len(rounds) + len(names)))
    for row, turn in enumerate(turns):
        design[row, rounds.index((turn.launch, turn.round))] = 1.0
        design[row, len(rounds) + names.index(turn.plan)] = 1.0
    seen = np.log([t.step_s for t in turns])
    parts, weights = _robust(design, seen)
    scatter = _scatter(seen - design @ parts, design)
    paces, plans = parts[: len(rounds)], parts[len(rounds) :]
    # Only differences between plans are known; a shift of all goes with the rounds.
    middle = float(np.median(plans))
    pace = median((paces + middle).tolist())
    spread = np.sqrt(scatter**2 / _turn_weights(weights, turns, names))
    return Times(
        plans={
            name: PlanTime(
                plan=name,
                step_s=math.exp(plans[i] - middle + pace),
                log_std=float(spread[i]),
                turns=sum(t.plan == name for t in turns),
            )
            for i, name in enumerate(names)
        },
        scatter_log=scatter,
    )


def _robust(design: Array, seen: Array) -> tuple[Array, Array]:
    """Returns the parts of a robust fit (the shortest of all equal ones) and the weights."""
    weights = np.ones(len(seen))
    parts: Array = np.zeros(design.shape[1])
    for _ in range(_ITERATIONS):
        root = np.sqrt(weights)
        found = np.asarray(np.linalg.lstsq(design * root[:, None], seen * root, rcond=None)[0])
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


def _turn_weights(weights: Array, turns: Sequence[TurnTime], names: Sequence[str]) -> Array:
    out = np.zeros(len(names))
    for weight, turn in zip(weights, turns, strict=True):
        out[names.index(turn.plan)] += weight
    return out
