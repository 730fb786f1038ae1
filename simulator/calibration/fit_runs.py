"""From measured runs to factors: how much slower each time class is than the curves say.

The model, for run i and time class c of family F:

    log(measured_ic / predicted_ic) = family_F + class_c + run_i + noise_ic

Families and classes are drawn toward 0 (factor 1), so few runs move them little; a class
that no run showed takes its family's factor with a wide deviation. `run_i` is what all
classes of one run share (the machine's mood). Outliers, of a class or of a whole run, count
less (Huber). Predictions are made anew with the factors found until those stand still,
because what a factor does to waiting and overlap is the simulator's business.

Then all factors are scaled by one number, so that step times are right on the whole: waiting
for a partner that is late belongs to no class, but to the step. How whole steps scatter
around that, with a prior, is the floor of a prediction's interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.report.compare import Comparison, compare
from flopwright.report.metrics import Measurement, Prediction
from flopwright.simulator.calibration.families import FAMILIES
from flopwright.simulator.calibration.identity import with_id
from flopwright.simulator.calibration.least_squares import Array, Prior, robust_fit
from flopwright.simulator.calibration.model import Calibration

Predict = Callable[[Calibration, Measurement], Prediction]

# Before any run: a family is off by a factor 1.65, a class from its family by 1.2 (1 sigma).
_FAMILY_STD: Final = 0.5
_CLASS_STD: Final = 0.2
# A class's time inside one run: 5 % of itself and 1 % of the step are not its own doing.
_CLASS_NOISE: Final = 0.05
_STEP_SHARE_NOISE: Final = 0.01
# Scatter between runs, worth four runs of evidence.
_RUN_STD: Final = 0.08
_RUN_DOF: Final = 4.0
# One number for all classes, before any run: a factor 1.35 (1 sigma).
_STEP_STD: Final = 0.3
_ROUNDS: Final = 6
_MEMORY_STD: Final = 0.1
_MEMORY_NOISE: Final = 0.02


@dataclass(frozen=True, slots=True)
class _Rows:
    """The classes seen in the runs: run and class index, log ratio, its noise."""

    run: Array
    cls: Array
    log_ratio: Array
    noise: Array


@dataclass(frozen=True, slots=True)
class _Factors:
    """Logarithms of the factors of all classes, and their deviations."""

    log_mean: Array
    log_std: Array


@dataclass(frozen=True, slots=True)
class _Steps:
    """Logarithm of what all factors are scaled by, its deviation, the steps' scatter."""

    log_mean: float
    log_std: float
    scatter: float


_CLASSES: Final = tuple(FAMILIES)
_FAMILY_NAMES: Final = tuple(dict.fromkeys(FAMILIES.values()))
# factor of class c = family part + class part: [classes, families + classes]
_DESIGN: Final = np.hstack(
    [
        np.array([[float(FAMILIES[c] == f) for f in _FAMILY_NAMES] for c in _CLASSES]),
        np.eye(len(_CLASSES)),
    ]
)


def fit_runs(
    calibration: Calibration, measurements: Sequence[Measurement], predict: Predict
) -> Calibration:
    """Returns the calibration with factors learnt from the measurements.

    Args:
        calibration: curves to start from; factors it has are learnt anew, from these
            measurements alone.
        measurements: of one stack; that of the calibration, unless it is a public prior.
        predict: what a calibration predicts for the plan of a measurement.

    Raises:
        InputError: no measurements, several stacks, or another stack than the curves'.
    """
    stack_id = check_stack(calibration, measurements)
    current = calibration.model_copy(update={"factors": {}, "memory_factors": {}})
    classes, steps = _Factors(np.zeros(len(_CLASSES)), np.zeros(len(_CLASSES))), _Steps(0, 0, 0)
    for _ in range(_ROUNDS):
        comparisons = [compare(predict(current, m), m) for m in measurements]
        classes = _learn(_rows(comparisons, current.factors), len(measurements))
        steps = _learn_steps(comparisons, steps.log_mean)
        factors = _named(np.exp(classes.log_mean + steps.log_mean))
        moved = [abs(np.log(f / current.factors.get(c, 1.0))) for c, f in factors.items()]
        current = current.model_copy(update={"factors": factors})
        if max(moved) < 1e-3:
            break
    learnt = current.model_copy(
        update={
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "source": f"{calibration.source}; factors of {len(measurements)} runs",
            "stack_id": stack_id,
            "factor_log_std": _named(np.hypot(classes.log_std, steps.log_std)),
            "memory_factors": _memory_factors(comparisons),
            "step_residual_log": steps.scatter,
            "step_residual_dof": _RUN_DOF + len(measurements),
            "measurements": tuple(sorted(m.id for m in measurements)),
            "base": calibration.id,
        }
    )
    return with_id(learnt, "cal")


def _named(values: Array) -> dict[str, float]:
    return dict(zip(_CLASSES, values.tolist(), strict=True))


def check_stack(calibration: Calibration, measurements: Sequence[Measurement]) -> str:
    """Returns the one stack that calibration and measurements share.

    Raises:
        InputError: there is none; the message counts the measurements of each stack.
    """
    if not measurements:
        raise InputError("there is no measurement to learn from; run a plan first")
    counts: dict[str, int] = {}
    for m in measurements:
        stack = m.fingerprint.stack_id()
        counts[stack] = counts.get(stack, 0) + 1
    known = ", ".join(f"{stack} ({n})" for stack, n in sorted(counts.items()))
    if len(counts) > 1:
        raise InputError(
            Violation(
                field="measurements",
                value=known,
                rule="come from several hardware and software stacks; a calibration holds for one",
                nearest_fix=f"choose one: --only-stack {max(counts, key=counts.__getitem__)}",
            )
        )
    (stack,) = counts
    if calibration.stack_id not in {"", stack}:
        raise InputError(
            Violation(
                field="calibration.stack_id",
                value=calibration.stack_id,
                rule=f"the curves were measured on another stack than the runs: {known}",
                nearest_fix="probe this machine with as many ranks as the runs had",
            )
        )
    return stack


def _rows(comparisons: Sequence[Comparison], factors: dict[str, float]) -> _Rows:
    """Returns the classes that both sides saw, relative to predictions without factors."""
    rows = []
    for run, comparison in enumerate(comparisons):
        step = comparison.metrics[0].measured
        for item in comparison.time_classes:
            if item.name not in FAMILIES or item.measured <= 0 or item.predicted <= 0:
                continue
            ratio = item.measured / item.predicted * factors.get(item.name, 1.0)
            noise = np.hypot(_CLASS_NOISE, _STEP_SHARE_NOISE * step / item.measured)
            rows.append((run, _CLASSES.index(item.name), np.log(ratio), noise))
    columns = np.array(rows, float).reshape(-1, 4).T
    return _Rows(columns[0].astype(int), columns[1].astype(int), columns[2], columns[3])


def _learn(rows: _Rows, num_runs: int) -> _Factors:
    """Fits families, classes and runs together."""
    num_factors = _DESIGN.shape[1]
    design = np.hstack([_DESIGN[rows.cls], np.eye(num_runs)[rows.run]])
    run_rows = np.hstack([np.zeros((num_runs, num_factors)), np.eye(num_runs)])
    stacked = np.vstack([design, run_rows])
    target = np.concatenate([rows.log_ratio, np.zeros(num_runs)])
    start = np.zeros(num_factors + num_runs)
    # Runs get their prior as residuals, so that a run that is off altogether counts less.
    stds = [_FAMILY_STD] * len(_FAMILY_NAMES) + [_CLASS_STD] * len(_CLASSES) + [1e3] * num_runs
    noise = np.concatenate([rows.noise, np.full(num_runs, _RUN_STD)])
    fit = robust_fit(
        lambda p: stacked @ p - target, start, Prior(mean=start, std=np.array(stds)), noise
    )
    covariance = fit.covariance[:num_factors, :num_factors]
    variance = np.einsum("cf,fg,cg->c", _DESIGN, covariance, _DESIGN)
    return _Factors(_DESIGN @ fit.params[:num_factors], np.sqrt(variance))


def _learn_steps(comparisons: Sequence[Comparison], applied: float) -> _Steps:
    """Fits the one number by which whole steps are off, and their scatter around it.

    Args:
        comparisons: of predictions whose factors already hold `applied` of that number.
    """
    steps = [c.metrics[0] for c in comparisons]
    logs = np.log([s.measured / s.predicted for s in steps]) + applied
    prior = Prior(np.zeros(1), np.full(1, _STEP_STD))
    scatter = _RUN_STD
    for _ in range(20):  # expectation-maximisation of the scatter
        fit = robust_fit(partial(_offsets, logs), np.zeros(1), prior, np.full(len(logs), scatter))
        squares = fit.weights * (fit.residuals**2 + fit.covariance[0, 0])
        total = _RUN_DOF * _RUN_STD**2 + squares.sum()
        scatter = float(np.sqrt(total / (_RUN_DOF + fit.weights.sum())))
    return _Steps(float(fit.params[0]), float(np.sqrt(fit.covariance[0, 0])), scatter)


def _offsets(logs: Array, params: Array) -> Array:
    return np.asarray(params[0] - logs)


def _memory_factors(comparisons: Sequence[Comparison]) -> dict[str, float]:
    """Returns measured / predicted bytes of each memory class, drawn toward 1."""
    ratios: dict[str, list[float]] = {}
    for comparison in comparisons:
        for item in comparison.memory_classes:
            # A class of a hundredth of the memory says nothing about its factor.
            if min(item.predicted, item.measured) > 0.01 * sum(
                c.measured for c in comparison.memory_classes
            ):
                ratios.setdefault(item.name, []).append(np.log(item.measured / item.predicted))
    factors = {}
    for name, found in sorted(ratios.items()):
        logs = np.array(found)
        fit = robust_fit(
            partial(_offsets, logs),
            np.zeros(1),
            Prior(np.zeros(1), np.full(1, _MEMORY_STD)),
            np.full(len(logs), _MEMORY_NOISE),
        )
        factors[name] = float(np.exp(fit.params[0]))
    return factors
