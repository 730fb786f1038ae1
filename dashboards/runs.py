"""The store's runs predicted again, as `flopwright compare` does (a test holds them equal)."""

from __future__ import annotations

from collections.abc import Sequence

from flopwright.errors import InputError
from flopwright.report.compare import Comparison, compare
from flopwright.report.compare_report import ComparedRun, ComparisonReport, make_report
from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.files import (
    default_calibration,
    own_folder,
    read_calibration,
)
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import plan_of, predict_measurement


def calibrations(measurements: Sequence[Measurement]) -> dict[str, Calibration]:
    """Returns by id what the runs can be predicted with, the default first.

    The user's own calibrations of the runs' stacks, those of the latest run's stack first
    and newest, and the public prior of the latest run's processor.
    """
    latest = measurements[-1].fingerprint.stack_id()
    stacks = {m.fingerprint.stack_id() for m in measurements}
    own = [c for c in _own() if c.stack_id in stacks]
    public = prior(measurements[-1])
    order = [
        *(c for c in own if c.stack_id == latest),
        public,
        *(c for c in own if c.stack_id != latest),
    ]
    return {c.id: c for c in order}


def _own() -> list[Calibration]:
    """Returns the user's own calibrations, newest first; a file that is none is skipped."""
    found = []
    for path in sorted(own_folder().glob("*.yaml")):
        try:
            found.append(read_calibration(path))
        except InputError:
            continue
    return sorted(found, key=lambda c: c.created, reverse=True)


def compared_runs(
    measurements: Sequence[Measurement], calibration: Calibration
) -> ComparisonReport:
    """Returns the runs of the calibration's stack compared under it.

    Where the calibration was learnt or measured, the public prior stands beside it as
    `before`.
    """
    runs = []
    for measurement in measurements:
        if calibration.stack_id not in {"", measurement.fingerprint.stack_id()}:
            continue
        public = prior(measurement)
        runs.append(
            ComparedRun(
                plan_name=measurement.plan_name,
                measurement_id=measurement.id,
                held_out=measurement.id not in calibration.measurements,
                before=_compared(measurement, public) if calibration != public else None,
                after=_compared(measurement, calibration),
            )
        )
    return make_report(runs)


def prior(measurement: Measurement) -> Calibration:
    """Returns the public prior of the processor that the run used."""
    return default_calibration(plan_of(measurement).scenario.cluster.node.gpu)


def _compared(measurement: Measurement, calibration: Calibration) -> Comparison:
    return compare(predict_measurement(calibration, measurement), measurement)
