"""The store's runs predicted again: what the Compare page shows."""

from __future__ import annotations

from collections.abc import Iterable

from flopwright.simulator.training.predict import predict

from flopwright.plan.file import PlanFile
from flopwright.report.compare import Comparison, compare
from flopwright.report.compare_report import ComparedRun, ComparisonReport, make_report
from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.files import own_folder, read_calibration
from flopwright.simulator.calibration.model import Calibration


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
                before=_compared(measurement, None) if before else None,
                after=_compared(measurement, calibration),
            )
        )
    return make_report(runs)


def _compared(measurement: Measurement, calibration: Calibration | None) -> Comparison:
    plan = PlanFile.model_validate(measurement.plan)
    prediction, _ = predict(plan.scenario, plan.parallel, calibration, name=measurement.plan_name)
    return compare(prediction, measurement)
