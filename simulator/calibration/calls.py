"""How much of a step goes on between its operators: what one second a call would add."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flopwright.report.metrics import Measurement, Prediction
from flopwright.simulator.calibration.evidence import PHASE_OF, PHASES
from flopwright.simulator.calibration.model import Calibration

_TRIED_S = 1e-4


def calls_of(
    calibration: Calibration,
    measurements: Sequence[Measurement],
    predict: Callable[[Calibration, Measurement], Prediction],
) -> list[dict[str, float]]:
    """Returns, by run, the seconds of each class that calls of one second would add.

    They are over the seconds of the curves alone; nothing where a calibration has no calls.
    """
    if not calibration.call_s:
        return [{} for _ in measurements]
    bare = calibration.model_copy(update={"call_s": dict.fromkeys(PHASES, 0.0)})
    tried = calibration.model_copy(update={"call_s": dict.fromkeys(PHASES, _TRIED_S)})
    out = []
    for m in measurements:
        alone, more = predict(bare, m).metrics.time_s, predict(tried, m).metrics.time_s
        out.append(
            {c: (more[c] / alone[c] - 1.0) / _TRIED_S for c in PHASE_OF if alone.get(c, 0.0) > 0}
        )
    return out
