"""Time classes and whole steps fitted together: families, classes, calls, waiting, runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.simulator.calibration.evidence import (
    CLASSES,
    FAMILY_NAMES,
    PHASE_OF,
    PHASES,
    Evidence,
    applied,
    by_class,
)
from flopwright.simulator.calibration.families import FAMILIES
from flopwright.simulator.calibration.least_squares import Array, Fit, Prior, robust_fit
from flopwright.simulator.calibration.model import Calibration

# Before any run: a family is off by a factor 1.65, a class from its family by 1.2 (1 sigma).
_FAMILY_STD: Final = 0.5
_CLASS_STD: Final = 0.2
# After reference steps the other plans of the same machine differ by this much more.
_NEW_PLAN_STD: Final = 0.1
# Waiting lengthens steps by a factor of e^0.3 before any was seen, and differs between plans.
_WAITING_STD: Final = 0.3
_NEW_WAITING_STD: Final = 0.3
# A whole step, beside its run's scatter.
_STEP_NOISE: Final = 0.03
# Scatter of a plan that was not learnt from, worth four runs of evidence: five plans hardly
# show how different the others are.
_PLAN_STD: Final = 0.1
RUN_DOF: Final = 4.0
# Between two operators of an eager program: 10 us, to a factor 4 (1 sigma); around a
# collective, waiting and packing: 0.3 ms, to a factor 2.
CALL_S: Final = {"forward": 1e-5, "backward": 1e-5, "sync": 3e-4}
CALL_LOG_STD: Final = {"forward": math.log(4.0), "backward": math.log(4.0), "sync": math.log(2.0)}

# factor of class c = family part + class part: [classes, families + classes]
_DESIGN: Final = np.hstack(
    [
        np.array([[float(FAMILIES[c] == f) for f in FAMILY_NAMES] for c in CLASSES]),
        np.eye(len(CLASSES)),
    ]
)
# the same of all shared parameters: calls are no part of a factor, waiting is of all
_WHOLE_DESIGN: Final = np.hstack(
    [_DESIGN, np.zeros((len(CLASSES), len(PHASES))), np.ones((len(CLASSES), 1))]
)
_NUM_FACTORS: Final = _DESIGN.shape[1]
_CALLS: Final = slice(_NUM_FACTORS, _NUM_FACTORS + len(PHASES))
_WAITING: Final = _NUM_FACTORS + len(PHASES)
_NUM_SHARED: Final = _WAITING + 1
# The sum of a class's events holds the calls between operators, not the waits around it.
_SEEN_IN_CLASS: Final = np.array([PHASE_OF.get(c) in {"forward", "backward"} for c in CLASSES])


@dataclass(frozen=True, slots=True)
class Learnt:
    """The result: logarithms of factors (waiting in them) with deviations, calls, scatter.

    Attributes:
        waiting_log: the part of every factor's logarithm that is waiting.
        scatter: standard deviation of a new run's log step around the prediction.
    """

    log_mean: Array
    log_std: Array
    call_s: dict[str, float]
    call_log_std: dict[str, float]
    waiting_log: float
    scatter: float


@dataclass(frozen=True, slots=True)
class ClassPrior:
    """What is known before the runs: means and deviations (log) of all shared parameters.

    Attributes:
        log_mean: of the classes' factors, waiting left out.
        calls: whether operators of this machine have calls.
    """

    log_mean: Array
    mean: Array
    std: Array
    calls: bool

    @classmethod
    def of(cls, calibration: Calibration) -> ClassPrior:
        """Returns the prior that a calibration is: its factors and calls, or none."""
        known, calls = calibration.factor_log_std, calibration.call_s
        spread = np.array([np.hypot(known.get(c, np.inf), _NEW_PLAN_STD) for c in CLASSES])
        families = [
            min(s for s, c in zip(spread, CLASSES, strict=True) if FAMILIES[c] == f)
            for f in FAMILY_NAMES
        ]
        waiting = calibration.waiting_log
        log_mean = np.log([calibration.factors.get(c, 1.0) for c in CLASSES]) - waiting
        return cls(
            log_mean=log_mean,
            mean=np.concatenate(
                [
                    np.zeros(_NUM_FACTORS),
                    [math.log(calls.get(p) or CALL_S[p]) for p in PHASES],
                    [waiting],
                ]
            ),
            std=np.concatenate(
                [
                    np.minimum(_FAMILY_STD, families),
                    np.minimum(_CLASS_STD, spread),
                    [
                        min(calibration.call_log_std.get(p, np.inf), CALL_LOG_STD[p])
                        for p in PHASES
                    ],
                    [_NEW_WAITING_STD if known else _WAITING_STD],
                ]
            ),
            calls=bool(calls),
        )

    def class_log_std(self) -> Array:
        """Returns the deviation (log) of each class's factor before any run."""
        return np.asarray(np.sqrt(_WHOLE_DESIGN**2 @ self.std**2))


def named(values: Array) -> dict[str, float]:
    """Returns values by class as a record."""
    return dict(zip(CLASSES, values.tolist(), strict=True))


def learn_classes(evidence: Evidence, current: Calibration, prior: ClassPrior) -> Learnt:
    """Fits families, classes, calls, waiting and runs together.

    Args:
        current: what the evidence's predictions were made with.
    """
    runs = len(evidence.log_step)
    before = np.log(applied(current, evidence.calls))
    total = np.maximum(evidence.seconds.sum(axis=1), 1e-300)

    def residuals(p: Array) -> Array:
        of_run, waiting = p[_NUM_SHARED:], p[_WAITING]
        call = np.exp(p[_CALLS]) if prior.calls else np.zeros(len(PHASES))
        logs = prior.log_mean + _DESIGN @ p[:_NUM_FACTORS]
        wanted = logs + np.log1p(evidence.calls * by_class(call))
        alone = np.where(_SEEN_IN_CLASS, wanted, logs)
        rows = alone[evidence.run, evidence.cls] + of_run[evidence.run] - evidence.log_measured
        scaled = (evidence.seconds * np.exp(wanted + waiting - before)).sum(axis=1) / total
        steps = np.log(np.maximum(scaled, 1e-300)) + of_run - evidence.log_step
        # Runs get their prior as residuals, so that a run that is off altogether counts less.
        return np.concatenate([rows, steps, of_run])

    start = np.concatenate([prior.mean, np.zeros(runs)])
    std = np.concatenate([prior.std, np.full(runs, 1e3)])
    noise = np.concatenate([evidence.noise, np.full(runs, _STEP_NOISE), evidence.run_std])
    fit = robust_fit(residuals, start, Prior(mean=start, std=std), noise)
    return _learnt(fit, prior, runs)


def log_steps(evidence: Evidence, learnt: Learnt, current: Calibration) -> tuple[Array, Array]:
    """Returns log of the steps over those predicted, and seconds by class, [runs, classes].

    Both are what `learnt` makes of the predictions in `evidence`: classes scale, and waiting
    for each other with them.

    Args:
        current: what the evidence's predictions were made with.
    """
    call = np.array([learnt.call_s.get(p, 0.0) for p in PHASES])
    wanted = learnt.log_mean + np.log1p(evidence.calls * by_class(call))
    before = np.log(applied(current, evidence.calls))
    seconds = evidence.seconds * np.exp(wanted - before)
    scaled = seconds.sum(axis=1) / np.maximum(evidence.seconds.sum(axis=1), 1e-300)
    return np.log(np.maximum(scaled, 1e-300)), np.asarray(seconds)


def _learnt(fit: Fit, prior: ClassPrior, runs: int) -> Learnt:
    shared = fit.params[:_NUM_SHARED]
    covariance = fit.covariance[:_NUM_SHARED, :_NUM_SHARED]
    call, deviation = np.exp(shared[_CALLS]), np.sqrt(np.diag(covariance)[_CALLS])
    steps = fit.residuals[-runs:] - fit.residuals[-2 * runs : -runs]
    return Learnt(
        log_mean=prior.log_mean + _DESIGN @ shared[:_NUM_FACTORS] + shared[_WAITING],
        log_std=np.sqrt(np.einsum("cf,fg,cg->c", _WHOLE_DESIGN, covariance, _WHOLE_DESIGN)),
        call_s=dict(zip(PHASES, call.tolist(), strict=True)) if prior.calls else {},
        call_log_std=dict(zip(PHASES, deviation.tolist(), strict=True)) if prior.calls else {},
        waiting_log=float(shared[_WAITING]),
        scatter=_scatter(steps, fit.weights[-runs:]),
    )


def _scatter(steps: Array, weights: Array) -> float:
    """Returns the scatter of steps around the fit, drawn toward _PLAN_STD; outliers count less.

    The fit took part of it away: a third of few runs, a few of many.
    """
    freed = 1.0 - min(_TAKEN, _MOST_TAKEN / len(steps))
    squares = float((weights * steps**2).sum()) / freed
    return float(np.sqrt((RUN_DOF * _PLAN_STD**2 + squares) / (RUN_DOF + weights.sum())))


_TAKEN: Final = 1 / 3
_MOST_TAKEN: Final = 4.0
