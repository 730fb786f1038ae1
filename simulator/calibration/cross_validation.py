"""How wide intervals must be: every plan is predicted by a fit that has not seen it.

A fit's own residuals are too small, and its deviations rest on noise that was assumed. So the
runs of each plan are left out in turn, the others are learnt from, and the runs left out are
predicted with that (linearised: classes scale, waiting with them). With
e_i = log(measured / predicted) and V_i = k^2 A_i + B_i, where A_i is scatter and what runs say
of the factors, and B_i what no run says of them (their priors), k^2 solves

    sum_i w_i (min(e_i^2 / V_i, c^2) - 1) + n0 (1 / k^2 - 1) = 0,    w_i = k^2 A_i / V_i,

the scale of largest likelihood, with n0 runs at k = 1 before any was seen, and runs beyond
c deviations counted as c. Scatter and the factors' deviations are multiplied by k. Scatter is at
least that of runs of one plan, where a launch ran a plan twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from flopwright.simulator.calibration.class_fit import (
    ClassPrior,
    Learnt,
    learn_classes,
    log_steps,
)
from flopwright.simulator.calibration.evidence import CLASSES, FAMILY_NAMES, Evidence
from flopwright.simulator.calibration.families import FAMILIES
from flopwright.simulator.calibration.least_squares import Array
from flopwright.simulator.calibration.model import Calibration

# Runs' worth of belief that the deviations assumed are right. They are a guess for any machine,
# 0.1 of a step: with one run's worth of it intervals of a machine that scatters by 2 % held 98 %
# of its runs. With none the predictive Student t is exact whatever the scatter is (for normal
# errors); a little keeps it defined where no run decides anything.
BEFORE: Final = 0.1
_CUT: Final = 2.5**2
# More plans than this are left out several at a time.
_FOLDS: Final = 12
_MOST: Final = 100.0
_IN_FAMILY: Final = np.array([[float(FAMILIES[c] == f) for c in CLASSES] for f in FAMILY_NAMES])


def widths(
    learnt: Learnt,
    evidence: Evidence,
    current: Calibration,
    prior: ClassPrior,
    plans: Sequence[str],
    twins_log_std: float = 0.0,
) -> tuple[Array, float]:
    """Returns deviations (log) of the classes' factors, and the scatter of a new plan's step.

    Args:
        learnt: from all of the evidence.
        current: what the evidence's predictions were made with.
        plans: what each run ran; runs of one plan are left out together.
        twins_log_std: scatter of runs of one plan, 0 where it was not seen.
    """
    names = list(dict.fromkeys(plans))
    if len(names) < 2:
        return learnt.log_std, max(learnt.scatter, twins_log_std)
    folds = np.array([names.index(p) % _FOLDS for p in plans])
    found = [_left_out(folds == f, evidence, current, prior) for f in np.unique(folds)]
    errors, decided, undecided = (np.concatenate(part) for part in zip(*found, strict=True))
    k = _scale(errors, decided, undecided)
    own = _undecided_share(learnt, prior)
    return (
        np.asarray(learnt.log_std * np.sqrt(k**2 * (1 - own) + own)),
        max(float(k * learnt.scatter), twins_log_std),
    )


def _left_out(
    out: np.ndarray[tuple[int], np.dtype[np.bool_]],
    evidence: Evidence,
    current: Calibration,
    prior: ClassPrior,
) -> tuple[Array, Array, Array]:
    """Returns e, A and B of the runs that are left out."""
    others = learn_classes(_of(evidence, ~out), current, prior)
    mine = _of(evidence, out)
    log_step, seconds = log_steps(mine, others, current)
    shares = seconds / (mine.step_s * np.exp(log_step))[:, None]
    own = _undecided_share(others, prior)
    decided = _variance(shares, others.log_std * np.sqrt(1 - own)) + others.scatter**2
    return mine.log_step - log_step, decided, _variance(shares, others.log_std * np.sqrt(own))


def _of(evidence: Evidence, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Evidence:
    """Returns the evidence of some runs alone."""
    rows = keep[evidence.run]
    place = np.cumsum(keep) - 1
    return replace(
        evidence,
        run=place[evidence.run[rows]],
        cls=evidence.cls[rows],
        log_measured=evidence.log_measured[rows],
        noise=evidence.noise[rows],
        seconds=evidence.seconds[keep],
        calls=evidence.calls[keep],
        log_step=evidence.log_step[keep],
        step_s=evidence.step_s[keep],
        run_std=evidence.run_std[keep],
    )


def _undecided_share(learnt: Learnt, prior: ClassPrior) -> Array:
    """Returns the share of each factor's variance that is its prior's: 1 where no run said."""
    return np.asarray(np.minimum(1.0, (learnt.log_std / prior.class_log_std()) ** 2))


def _variance(shares: Array, log_std: Array) -> Array:
    """Returns the variance of log steps by families, as intervals have it (interval.py)."""
    return np.asarray((((shares * log_std) @ _IN_FAMILY.T) ** 2).sum(axis=1))


def _scale(errors: Array, decided: Array, undecided: Array) -> float:
    """Returns k by bisection: what is searched falls where k^2 passes it."""

    def excess(k2: float) -> float:
        variance = k2 * decided + undecided
        weight = k2 * decided / variance
        beyond = np.minimum(errors**2 / variance, _CUT) - 1.0
        return float((weight * beyond).sum() + BEFORE * (1.0 / k2 - 1.0))

    low, high = -math.log(_MOST), math.log(_MOST)
    for _ in range(60):
        middle = (low + high) / 2
        if excess(math.exp(middle)) > 0:
            low = middle
        else:
            high = middle
    return math.exp(low / 2)
