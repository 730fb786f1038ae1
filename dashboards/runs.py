"""The store's runs predicted again: what the Compare page shows."""

from __future__ import annotations

from collections.abc import Iterable

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


def calibrations() -> dict[str, Calibration]:
    """Returns the user's own calibrations by id, the newest first."""
    found = [read_calibration(path) for path in sorted(own_folder().glob("*.yaml"))]
    return {c.id: c for c in sorted(found, key=lambda c: c.created, reverse=True)}


def compared_runs(
    measurements: Iterable[Measurement], calibration: Calibration | None, *, before: bool
) -> ComparisonReport:
    """Returns the runs compared under `calibration`, and under the public prior (`before`)."""
    runs = []
    for measurement in measurements:
        learnt = calibration is not None and measurement.id in calibration.measurements
        runs.append(
            ComparedRun(
                plan_name=measurement.plan_name,
                measurement_id=measurement.id,
                held_out=not learnt,
                before=_compared(measurement, prior(measurement)) if before else None,
                after=_compared(measurement, calibration or prior(measurement)),
            )
        )
    return make_report(runs)


def prior(measurement: Measurement) -> Calibration:
    """Returns the public prior of the processor that the run used."""
    return default_calibration(plan_of(measurement).scenario.cluster.node.gpu)


def _compared(measurement: Measurement, calibration: Calibration) -> Comparison:
    return compare(predict_measurement(calibration, measurement), measurement)
