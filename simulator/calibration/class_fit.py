"""Time classes and whole steps fitted together: families, classes, calls, waiting, runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.report.compare import Comparison
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
# A class's time inside one run: 5 % of itself and 1 % of the step are not its own doing.
_CLASS_NOISE: Final = 0.05
_STEP_SHARE_NOISE: Final = 0.01
# A whole step, beside its run's scatter.
_STEP_NOISE: Final = 0.03
# Scatter between runs.
RUN_STD: Final = 0.08
# Scatter of a plan that was not learnt from, worth four runs of evidence: five plans hardly
# show how different the others are.
_PLAN_STD: Final = 0.1
RUN_DOF: Final = 4.0
# Between two operators of an eager program: 10 us, to a factor 4 (1 sigma); around a
# collective, waiting and packing: 0.3 ms, to a factor 2.
CALL_S: Final = {"forward": 1e-5, "backward": 1e-5, "sync": 3e-4}
CALL_LOG_STD: Final = {"forward": math.log(4.0), "backward": math.log(4.0), "sync": math.log(2.0)}

CLASSES: Final = tuple(FAMILIES)
FAMILY_NAMES: Final = tuple(dict.fromkeys(FAMILIES.values()))
# What a step does between its operators, and what a collective inside a layer adds to itself.
PHASES: Final = ("forward", "backward", "sync")
PHASE_OF: Final = {
    "forward": "forward",
    "recompute": "forward",
    "backward": "backward",
    "tp_comm": "sync",
    "cp_comm": "sync",
    "ep_comm": "sync",
}
# factor of class c = family part + class part: [classes, families + classes]
_DESIGN: Final = np.hstack(
    [
        np.array([[float(FAMILIES[c] == f) for f in FAMILY_NAMES] for c in CLASSES]),
        np.eye(len(CLASSES)),
    ]
)
_NUM_FACTORS: Final = _DESIGN.shape[1]
_CALLS: Final = slice(_NUM_FACTORS, _NUM_FACTORS + len(PHASES))
_WAITING: Final = _NUM_FACTORS + len(PHASES)
_NUM_SHARED: Final = _WAITING + 1
# The sum of a class's events holds the calls between operators, not the waits around it.
_SEEN_IN_CLASS: Final = np.array([PHASE_OF.get(c) in {"forward", "backward"} for c in CLASSES])
_CALL_OF_CLASS: Final = np.array(
    [PHASES.index(PHASE_OF[c]) if c in PHASE_OF else -1 for c in CLASSES]
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the runs say, beside predictions of a calibration.

    Attributes:
        run, cls: of each class row, as whole numbers.
        log_measured: of each class row, measured seconds over those of the curves alone.
        noise: of each class row (log).
        seconds: predicted by run and class, [runs, classes].
        calls: what calls of one second would add to them, over the curves alone.
        log_step: measured step over the predicted one, [runs]; run_std: how much runs of that
            launch scatter.
    """

    run: Array
    cls: Array
    log_measured: Array
    noise: Array
    seconds: Array
    calls: Array
    log_step: Array
    run_std: Array


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


def named(values: Array) -> dict[str, float]:
    """Returns values by class as a record."""
    return dict(zip(CLASSES, values.tolist(), strict=True))


def evidence_of(
    comparisons: Sequence[Comparison],
    calibration: Calibration,
    calls: Sequence[Mapping[str, float]],
) -> Evidence:
    """Returns the classes that both sides saw, and the steps, beside what `calibration` says.

    Args:
        calls: by run, what calls of one second would add to a class, over its curves alone.
    """
    rows = []
    mood = np.array([_run_std(c.noise_floor) for c in comparisons])
    seconds = np.zeros((len(comparisons), len(CLASSES)))
    share = np.array([[calls[i].get(c, 0.0) for c in CLASSES] for i in range(len(comparisons))])
    applied = _applied(calibration, share.reshape(len(comparisons), -1))
    for run, comparison in enumerate(comparisons):
        step = comparison.metrics[0].measured
        waited = sum(c.measured - c.predicted for c in comparison.time_classes if c.name == "idle")
        # Half of the time that ranks wait, and no class explains, may be any class's doing.
        waited = max(waited, 0.0) / 2
        for item in comparison.time_classes:
            if item.name not in FAMILIES:
                continue
            cls = CLASSES.index(item.name)
            seconds[run, cls] = item.predicted
            if item.measured > 0 and item.predicted > 0:
                ratio = item.measured / item.predicted * applied[run, cls]
                share_noise = _STEP_SHARE_NOISE * step / item.measured
                blurred = waited / item.measured
                noise = math.hypot(_CLASS_NOISE, share_noise, blurred, mood[run] / 2)
                rows.append((run, cls, np.log(ratio), noise))
    columns = np.array(rows, float).reshape(-1, 4).T
    steps = [c.metrics[0] for c in comparisons]
    return Evidence(
        run=columns[0].astype(int),
        cls=columns[1].astype(int),
        log_measured=columns[2],
        noise=columns[3],
        seconds=seconds,
        calls=share,
        log_step=np.log([s.measured / s.predicted for s in steps]),
        run_std=mood,
    )


def _run_std(noise_floor: float | None) -> float:
    """Returns the scatter (log) of runs: two runs of one plan differ by 1.4 times as much."""
    return max(RUN_STD, math.log1p(noise_floor or 0.0) / math.sqrt(2))


def _applied(calibration: Calibration, share: Array) -> Array:
    """Returns what factors and calls multiply the curves by, [runs, classes]."""
    factors = np.array([calibration.factors.get(c, 1.0) for c in CLASSES])
    call = np.array([calibration.call_s.get(p, 0.0) for p in PHASES])
    return np.asarray(factors * (1.0 + share * _by_class(call)))


def _by_class(call: Array) -> Array:
    return np.where(_CALL_OF_CLASS >= 0, call[_CALL_OF_CLASS], 0.0)


def learn_classes(evidence: Evidence, current: Calibration, prior: ClassPrior) -> Learnt:
    """Fits families, classes, calls, waiting and runs together.

    Args:
        current: what the evidence's predictions were made with.
    """
    runs = len(evidence.log_step)
    applied = np.log(_applied(current, evidence.calls))
    total = np.maximum(evidence.seconds.sum(axis=1), 1e-300)

    def residuals(p: Array) -> Array:
        of_run, waiting = p[_NUM_SHARED:], p[_WAITING]
        call = np.exp(p[_CALLS]) if prior.calls else np.zeros(len(PHASES))
        logs = prior.log_mean + _DESIGN @ p[:_NUM_FACTORS]
        wanted = logs + np.log1p(evidence.calls * _by_class(call))
        alone = np.where(_SEEN_IN_CLASS, wanted, logs)
        rows = alone[evidence.run, evidence.cls] + of_run[evidence.run] - evidence.log_measured
        scaled = (evidence.seconds * np.exp(wanted + waiting - applied)).sum(axis=1) / total
        steps = np.log(np.maximum(scaled, 1e-300)) + of_run - evidence.log_step
        # Runs get their prior as residuals, so that a run that is off altogether counts less.
        return np.concatenate([rows, steps, of_run])

    start = np.concatenate([prior.mean, np.zeros(runs)])
    std = np.concatenate([prior.std, np.full(runs, 1e3)])
    noise = np.concatenate([evidence.noise, np.full(runs, _STEP_NOISE), evidence.run_std])
    fit = robust_fit(residuals, start, Prior(mean=start, std=std), noise)
    return _learnt(fit, prior, runs)


def _learnt(fit: Fit, prior: ClassPrior, runs: int) -> Learnt:
    shared = fit.params[:_NUM_SHARED]
    # A factor is its family, its class and the waiting together.
    design = np.hstack(
        [_DESIGN, np.zeros((len(CLASSES), len(PHASES))), np.ones((len(CLASSES), 1))]
    )
    covariance = fit.covariance[:_NUM_SHARED, :_NUM_SHARED]
    call, deviation = np.exp(shared[_CALLS]), np.sqrt(np.diag(covariance)[_CALLS])
    steps = fit.residuals[-runs:] - fit.residuals[-2 * runs : -runs]
    return Learnt(
        log_mean=prior.log_mean + _DESIGN @ shared[:_NUM_FACTORS] + shared[_WAITING],
        log_std=np.sqrt(np.einsum("cf,fg,cg->c", design, covariance, design)),
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
