"""Predictions of runs by a fit that has not seen them, nor what they are another spelling of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.simulator.accuracy.fit_levels import SCATTER, LevelFit, fit_levels
from flopwright.simulator.accuracy.fit_step import StepArrays

Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Predictions of runs that their fit left out.

    Attributes:
        log_s: log of the predicted step seconds, (R,).
        log_std: standard deviation of log(measured / predicted), (R,).
        theta: parameters of the fold of each run, (R, P).
    """

    log_s: Array
    log_std: Array
    theta: Array


def held_out(
    whole: LevelFit,
    arrays: StepArrays,
    measured_s: Array,
    weights: Array,
    folds: Sequence[str],
    advance: Advance | None = None,
) -> HeldOut:
    """Returns each run's prediction by a fit without the runs of its fold.

    Args:
        whole: a fit to all runs, from which the folds' fits start.
        weights: of each run in a fit; 0 is predicted but never learnt from.
        folds: runs with one name are left out together.
    """
    labels = np.array(folds)
    names = list(dict.fromkeys(folds))
    log_s, log_std = np.zeros(len(labels)), np.zeros(len(labels))
    theta = np.zeros((len(labels), len(whole.design.names)))
    for done, name in enumerate(names):
        out = np.flatnonzero(labels == name)
        kept = weights.copy()
        kept[out] = 0.0
        start = whole.posterior.theta
        fit = fit_levels(whole.design, arrays, measured_s, kept, whole.sigma, start)
        log_s[out], log_std[out] = predicted(fit, arrays.take(out), out)
        theta[out] = fit.posterior.theta
        if advance is not None:
            advance(done + 1, len(names))
    return HeldOut(log_s, log_std, theta)


def predicted(fit: LevelFit, arrays: StepArrays, rows: NDArray[Any]) -> tuple[Array, Array]:
    """Returns (log step seconds, standard deviation of log(measured / predicted)) of runs.

    The deviation is the scatter inside a stack and what the fit does not know of the
    parameters: wide for a run whose stack it never saw.

    Args:
        arrays: of the runs `rows` alone.
    """
    logs, slope = fit.design.log_steps(fit.posterior.theta, arrays, rows)
    variance = np.einsum("rp,pq,rq->r", slope, fit.posterior.covariance, slope)
    return logs, np.sqrt(SCATTER**2 + variance)
