"""From measured steps to factors: how much slower each time class is than the curves say.

The model, for run i and time class c of family F:

    log(measured_ic) = log(curves_ic + call_p * operators_ic) + family_F + class_c + run_i + noise
    log(step_i) = log(predicted with all of these) + waiting + run_i + noise

`curves_ic` is what the simulator makes of the curves alone, `operators_ic` how many operators
of phase p the class runs one after the other, `call_p` what the program between them takes.
Families and classes are drawn toward what was known before (a probe's reference steps, or
factor 1), so few runs move them little; a class that no run showed takes its family's factor
with a wide deviation. `run_i` is what all classes of one run share (the machine's mood).
Outliers, of a class or of a whole run, count less (Huber). Predictions are made anew with the
factors found until those stand still, because what a factor does to waiting and overlap is
the simulator's business.

Waiting for a partner that is late belongs to no class, but to the step: one number scales
them all. Where much of a step was waited, its classes say less, and the step decides.
How wide intervals are is judged on plans that a fit has not seen (cross_validation.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.report.compare import Comparison, compare
from flopwright.report.drift import hardware_id
from flopwright.report.metrics import Measurement, Prediction
from flopwright.simulator.calibration.calls import calls_of
from flopwright.simulator.calibration.class_fit import (
    RUN_DOF,
    ClassPrior,
    Learnt,
    learn_classes,
    named,
)
from flopwright.simulator.calibration.cross_validation import BEFORE, widths
from flopwright.simulator.calibration.evidence import Evidence, evidence_of, twins_log_std
from flopwright.simulator.calibration.identity import with_id
from flopwright.simulator.calibration.memory_fit import memory_factors
from flopwright.simulator.calibration.model import Calibration

Predict = Callable[[Calibration, Measurement], Prediction]

_ROUNDS: Final = 6
# What other versions of the software may change of a factor (log), the hardware being the same.
OTHER_SOFTWARE_LOG: Final = 0.2


def fit_runs(
    calibration: Calibration, measurements: Sequence[Measurement], predict: Predict
) -> Calibration:
    """Returns the calibration with factors learnt from the measurements.

    Args:
        calibration: curves to start from, and factors that a probe gave; factors learnt from
            runs before are learnt anew, from these measurements alone.
        measurements: of one stack; that of the calibration, unless it is a public prior or was
            measured on the same hardware with other software: it is then less sure.
        predict: what a calibration predicts for the plan of a measurement.

    Raises:
        InputError: no measurements, several stacks, or other hardware than the curves'.
    """
    check_stack(calibration, measurements)
    start = _for_stack(before_runs(calibration), measurements[0])
    return _finished(start, calibration, measurements, predict)


def update_runs(
    calibration: Calibration, measurements: Sequence[Measurement], predict: Predict
) -> Calibration:
    """Returns the calibration after some more runs, those it learnt from not looked at again.

    What it knows is the prior of what the new runs say, a little less sure than it was, so
    that a machine that has changed is followed. Runs that it has seen are passed over.

    Raises:
        InputError: as `fit_runs`; or there is no run that it has not seen.
    """
    new = [m for m in measurements if m.id not in calibration.measurements]
    if not new:
        raise InputError("the calibration has learnt from all of these runs already")
    check_stack(calibration, new)
    start = _for_stack(calibration, new[0])
    learnt = _finished(start, calibration, new, predict)
    ids = tuple(sorted({*calibration.measurements, *learnt.measurements}))
    return with_id(
        learnt.model_copy(
            update={
                "measurements": ids,
                "step_residual_dof": RUN_DOF + len(ids),
                **{name: getattr(calibration, name) for name in _BEFORE},
            }
            if calibration.measurements
            else {}
        ),
        "cal",
    )


_BEFORE: Final = ("probe_factors", "probe_factor_log_std", "probe_calls", "probe_waiting_log")


def _finished(
    start: Calibration,
    base: Calibration,
    measurements: Sequence[Measurement],
    predict: Predict,
) -> Calibration:
    taught = learn(start, measurements, predict)
    where = measurements[0].fingerprint
    plans = [_what_ran(m) for m in measurements]
    several = len(set(plans)) > 1
    log_std, scatter = widths(
        taught.learnt,
        taught.evidence,
        taught.priced_with,
        taught.prior,
        plans,
        twins_log_std(measurements),
    )
    learnt = taught.calibration.model_copy(
        update={
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "source": f"{start.source}; factors of {len(measurements)} runs",
            "stack_id": where.stack_id(),
            "hardware_id": hardware_id(where),
            "factor_log_std": named(log_std),
            "step_residual_log": scatter,
            "step_residual_dof": (BEFORE if several else RUN_DOF) + len(measurements),
            "memory_factors": memory_factors(start, measurements, taught.comparisons),
            "measurements": tuple(sorted(m.id for m in measurements)),
            "base": base.id,
            "probe_factors": start.factors,
            "probe_factor_log_std": start.factor_log_std,
            "probe_calls": {"s": start.call_s, "log_std": start.call_log_std},
            "probe_waiting_log": start.waiting_log,
        }
    )
    return with_id(learnt, "cal")


def _what_ran(measurement: Measurement) -> str:
    """Returns what runs of one plan share, whatever they were called."""
    plan = measurement.plan
    if not plan:
        return measurement.plan_name
    return json.dumps([plan.get("scenario_hash"), plan.get("parallel")], sort_keys=True)


def _for_stack(calibration: Calibration, measurement: Measurement) -> Calibration:
    """Returns the calibration as a prior for the measurement's stack: wider for other software."""
    if calibration.stack_id in {"", measurement.fingerprint.stack_id()}:
        return calibration
    known = calibration.factor_log_std
    return calibration.model_copy(
        update={
            "factor_log_std": {
                c: float(np.hypot(s, OTHER_SOFTWARE_LOG)) for c, s in known.items()
            },
            "source": f"{calibration.source}; of other software on this hardware",
        }
    )


def before_runs(calibration: Calibration) -> Calibration:
    """Returns the calibration without what it learnt from whole runs."""
    if not calibration.measurements:
        return calibration.model_copy(update={"memory_factors": {}})
    return calibration.model_copy(
        update={
            "factors": calibration.probe_factors,
            "factor_log_std": calibration.probe_factor_log_std,
            "call_s": calibration.probe_calls.get("s", {}),
            "call_log_std": calibration.probe_calls.get("log_std", {}),
            "waiting_log": calibration.probe_waiting_log,
            "probe_factors": {},
            "probe_factor_log_std": {},
            "probe_calls": {},
            "probe_waiting_log": 0.0,
            "memory_factors": {},
            "measurements": (),
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Taught:
    """What runs taught.

    Attributes:
        calibration: with new factors, calls and scatter.
        comparisons: the last ones; `evidence` is theirs, and `priced_with` made them.
        learnt, prior: the last fit, and what it began with.
    """

    calibration: Calibration
    comparisons: tuple[Comparison, ...]
    evidence: Evidence
    priced_with: Calibration
    learnt: Learnt
    prior: ClassPrior


def learn(start: Calibration, measurements: Sequence[Measurement], predict: Predict) -> Taught:
    """Returns what the measurements teach.

    Args:
        start: its factors and calls, with their deviations, are the prior.
    """
    prior = ClassPrior.of(start)
    calls = calls_of(start, measurements, predict)
    current = start
    for _ in range(_ROUNDS):
        priced_with = current
        comparisons = tuple(compare(predict(current, m), m) for m in measurements)
        evidence = evidence_of(comparisons, current, calls)
        learnt = learn_classes(evidence, current, prior)
        factors = named(np.exp(learnt.log_mean))
        moved = [abs(np.log(f / current.factors.get(c, 1.0))) for c, f in factors.items()]
        current = current.model_copy(
            update={
                "factors": factors,
                "factor_log_std": named(learnt.log_std),
                "call_s": learnt.call_s,
                "call_log_std": learnt.call_log_std,
                "waiting_log": learnt.waiting_log,
                "step_residual_log": learnt.scatter,
                "step_residual_dof": RUN_DOF + len(measurements),
            }
        )
        if max(moved) < 1e-3:
            break
    return Taught(
        calibration=current,
        comparisons=comparisons,
        evidence=evidence,
        priced_with=priced_with,
        learnt=learnt,
        prior=prior,
    )


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
    here = hardware_id(measurements[0].fingerprint)
    if calibration.stack_id not in {"", stack} and calibration.hardware_id != here:
        raise InputError(
            Violation(
                field="calibration.stack_id",
                value=calibration.stack_id,
                rule=f"the curves were measured on other hardware than the runs: {known}",
                nearest_fix="probe this machine with as many ranks as the runs had",
            )
        )
    return stack
