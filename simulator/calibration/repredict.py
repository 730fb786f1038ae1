"""What a calibration predicts for a plan that has been measured, and how far off it is."""

from __future__ import annotations

from pydantic import ValidationError

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.report.metrics import Measurement, Prediction
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.predict import predict


def plan_of(measurement: Measurement) -> PlanFile:
    """Returns the plan that a measurement ran.

    Raises:
        InputError: the stored plan is not one that this version reads.
    """
    try:
        return PlanFile.model_validate(measurement.plan)
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(
            Violation(
                field=f"measurements.{measurement.id}.plan.{'.'.join(map(str, first['loc']))}",
                rule=f"the measured plan cannot be read: {first['msg']}",
                nearest_fix=f"leave it out with --exclude {measurement.plan_name}, "
                "or run its plan again",
            )
        ) from error


def predict_measurement(calibration: Calibration, measurement: Measurement) -> Prediction:
    """Returns the prediction of the measured plan on its own scenario."""
    plan = plan_of(measurement)
    prediction, _ = predict(plan.scenario, plan.parallel, calibration, name=measurement.plan_name)
    return prediction


def prior_of(measurement: Measurement) -> Calibration:
    """Returns the public prior of the processor that a measurement ran on."""
    return default_calibration(plan_of(measurement).scenario.cluster.node.gpu)
