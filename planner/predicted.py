"""A prediction's summary as it stands in a plan file."""

from __future__ import annotations

from flopwright.plan.file import PredictedStep
from flopwright.report.metrics import Prediction
from flopwright.units import format_bytes, format_seconds


def predicted_step(prediction: Prediction) -> PredictedStep:
    """Returns step time, its interval, peak memory and what they rest on."""
    interval = prediction.step_time_interval
    # Quantities are text with a unit wherever a file is written.
    return PredictedStep.model_validate(
        {
            "step_time": format_seconds(prediction.metrics.step_time_s),
            "interval80_low": format_seconds(interval.low),
            "interval80_high": format_seconds(interval.high),
            "peak_memory": format_bytes(prediction.metrics.peak_memory_bytes),
            "provenance": prediction.provenance,
            "calibration_id": prediction.calibration_id,
        }
    )
