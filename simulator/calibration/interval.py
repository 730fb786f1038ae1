"""How sure a predicted step time is.

log(measured / predicted) of a step is taken as normal. Its variance is the scatter that
runs showed around the calibrated prediction, plus what is not known of the factors, to
first order `var = residual^2 + sum_f (sum_c time_c / step_time * std_c)^2` over families f of
classes c: what one class's factor is wrong by, the others of its family are too (they were
learnt from the same runs), so inside a family deviations add up, between families they do
not. Where the scatter was estimated from few runs, Student's t takes the normal's place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Final

from flopwright.report.metrics import Interval
from flopwright.simulator.calibration.families import FAMILIES
from flopwright.simulator.calibration.model import Calibration

# Root mean square of log(measured / fitted) of bf16 products with sides 2 to 8 times beyond the
# points of the fit, over five GPUs of the public tables: 0.07 to 0.10.
EXTRAPOLATION_LOG: Final = 0.1


def student_t_quantile(probability: float, dof: float | None) -> float:
    """Returns the quantile of Student's t; dof None is the normal.

    Cornish-Fisher expansion in 1/dof (Abramowitz and Stegun 26.7.5): four terms are within
    1 % for the 0.9 quantile from 2 degrees of freedom on.
    """
    z = NormalDist().inv_cdf(probability)
    if dof is None:
        return z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / dof ** (i + 1) for i, term in enumerate(terms))


def step_time_log_std(
    calibration: Calibration, time_s: Mapping[str, float], *, extrapolated: bool = False
) -> float:
    """Returns the standard deviation of log(measured / predicted) of a step.

    Args:
        calibration: what the prediction was made with.
        time_s: predicted seconds by time class; they sum to the step.
        extrapolated: whether operators of it lie outside the points of their curves.
    """
    total = sum(time_s.values())
    beyond = EXTRAPOLATION_LOG if extrapolated else 0.0
    if total <= 0:
        return math.hypot(calibration.step_residual_log, beyond)
    by_family: dict[str, float] = {}
    for cls, seconds in time_s.items():
        part = seconds / total * calibration.factor_log_std.get(cls, 0.0)
        family = FAMILIES.get(cls, cls)
        by_family[family] = by_family.get(family, 0.0) + part
    variance = sum(part**2 for part in by_family.values())
    return math.sqrt(calibration.step_residual_log**2 + variance + beyond**2)


def step_time_interval(
    calibration: Calibration,
    time_s: Mapping[str, float],
    probability: float = 0.8,
    *,
    extrapolated: bool = False,
) -> Interval:
    """Returns the central interval of the step time, in seconds.

    Args:
        calibration: what the prediction was made with.
        time_s: predicted seconds by time class (idle included); they sum to the step.
        probability: that the measured step time lies inside.
        extrapolated: whether operators of it lie outside the points of their curves.
    """
    total = sum(time_s.values())
    quantile = student_t_quantile((1 + probability) / 2, calibration.step_residual_dof)
    deviation = step_time_log_std(calibration, time_s, extrapolated=extrapolated)
    spread = math.exp(quantile * deviation)
    return Interval(low=total / spread, high=total * spread, probability=probability)
