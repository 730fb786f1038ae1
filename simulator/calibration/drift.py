"""Whether a machine still does what its calibration says: runs that came after it.

A series of one plan's times that drifts is found by report/drift.py; here all plans' runs
are held against what the calibration predicts for them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median
from typing import Final

from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.fit_runs import Predict
from flopwright.simulator.calibration.interval import step_time_log_std
from flopwright.simulator.calibration.model import Calibration

# A shift smaller than this is not worth a word, whatever its significance.
_LEAST: Final = 0.03
_FALSE_ALARM: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationDrift:
    """How far new runs are from the calibration, as a whole.

    Attributes:
        shift_log: median of log(measured / predicted); sigma_log: what it may be by chance.
        runs: new runs of the calibration's stack.
        stacks: stacks of other runs on the same hardware: their software has changed.
    """

    shift_log: float
    sigma_log: float
    runs: int
    stacks: tuple[str, ...] = ()

    @property
    def alarm(self) -> bool:
        """Whether it is more than chance, and more than 3 %."""
        beyond = NormalDist().inv_cdf(1 - _FALSE_ALARM / 2)
        large = abs(self.shift_log) > max(_LEAST, beyond * self.sigma_log)
        return self.runs > 0 and large

    def text(self) -> str:
        """Returns a line that says so."""
        if self.runs == 0:
            return "no run since the calibration"
        percent = 100 * math.expm1(self.shift_log)
        word = "slower" if percent > 0 else "faster"
        line = f"{self.runs} runs since are {abs(percent):.1f} % {word} than it says"
        line += ": calibrate again" if self.alarm else ", within its scatter"
        if self.stacks:
            line += f"; other software since: {', '.join(self.stacks)}"
        return line


def drift_of(
    calibration: Calibration, measurements: Sequence[Measurement], predict: Predict
) -> CalibrationDrift:
    """Returns how runs that the calibration has not learnt from differ from its predictions."""
    new = [m for m in measurements if m.id not in calibration.measurements]
    mine = [m for m in new if m.fingerprint.stack_id() == calibration.stack_id]
    others = {m.fingerprint.stack_id() for m in new} - {calibration.stack_id}
    if not mine:
        return CalibrationDrift(shift_log=0.0, sigma_log=0.0, runs=0, stacks=tuple(sorted(others)))
    predicted = [predict(calibration, m).metrics for m in mine]
    logs = [math.log(m.metrics.step_time_s / p.step_time_s) for m, p in zip(mine, predicted,
            strict=True)]  # fmt: skip
    residual = calibration.step_residual_log
    # What is not known of the factors shifts all runs alike, and no number of them averages it.
    shared = median(step_time_log_std(calibration, p.time_s) ** 2 - residual**2 for p in predicted)
    # The median's standard error is 1.25 times the mean's.
    sigma = math.sqrt((1.25 * residual) ** 2 / len(logs) + max(shared, 0.0))
    return CalibrationDrift(
        shift_log=median(logs), sigma_log=sigma, runs=len(logs), stacks=tuple(sorted(others))
    )
