"""What measured runs say of time classes and whole steps, beside a calibration's predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from flopwright.report.compare import Comparison
from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.families import FAMILIES
from flopwright.simulator.calibration.least_squares import Array
from flopwright.simulator.calibration.model import Calibration

# A class's time inside one run: 5 % of itself and 1 % of the step are not its own doing.
_CLASS_NOISE: Final = 0.05
_STEP_SHARE_NOISE: Final = 0.01
# Scatter between runs.
RUN_STD: Final = 0.08

CLASSES: Final = tuple(FAMILIES)
FAMILY_NAMES: Final = tuple(dict.fromkeys(FAMILIES.values()))
# What a step does between its operators, and what a collective inside a layer adds to itself.
PHASES: Final = ("forward", "backward", "sync")
PHASE_OF: Final = {
    "forward": "forward",
    "recompute": "forward",
    "backward": "backward",
    "tp_comm": "sync",
    "cp_comm": "sync",
    "ep_comm": "sync",
}
_CALL_OF_CLASS: Final = np.array(
    [PHASES.index(PHASE_OF[c]) if c in PHASE_OF else -1 for c in CLASSES]
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the runs say, beside predictions of a calibration.

    Attributes:
        run, cls: of each class row, as whole numbers.
        log_measured: of each class row, measured seconds over those of the curves alone.
        noise: of each class row (log).
        seconds: predicted by run and class, [runs, classes].
        calls: what calls of one second would add to them, over the curves alone.
        log_step: measured step over the predicted one, [runs]; step_s: the predicted one.
        run_std: how much runs of that launch scatter, [runs].
    """

    run: Array
    cls: Array
    log_measured: Array
    noise: Array
    seconds: Array
    calls: Array
    log_step: Array
    step_s: Array
    run_std: Array


def evidence_of(
    comparisons: Sequence[Comparison],
    calibration: Calibration,
    calls: Sequence[Mapping[str, float]],
) -> Evidence:
    """Returns the classes that both sides saw, and the steps, beside what `calibration` says.

    Args:
        calls: by run, what calls of one second would add to a class, over its curves alone.
    """
    rows = []
    mood = np.array([_run_std(c.noise_floor) for c in comparisons])
    seconds = np.zeros((len(comparisons), len(CLASSES)))
    share = np.array([[calls[i].get(c, 0.0) for c in CLASSES] for i in range(len(comparisons))])
    applied_here = applied(calibration, share.reshape(len(comparisons), -1))
    for run, comparison in enumerate(comparisons):
        step = comparison.metrics[0].measured
        waited = sum(c.measured - c.predicted for c in comparison.time_classes if c.name == "idle")
        # Half of the time that ranks wait, and no class explains, may be any class's doing.
        waited = max(waited, 0.0) / 2
        for item in comparison.time_classes:
            if item.name not in FAMILIES:
                continue
            cls = CLASSES.index(item.name)
            seconds[run, cls] = item.predicted
            if item.measured > 0 and item.predicted > 0:
                ratio = item.measured / item.predicted * applied_here[run, cls]
                share_noise = _STEP_SHARE_NOISE * step / item.measured
                blurred = waited / item.measured
                noise = math.hypot(_CLASS_NOISE, share_noise, blurred, mood[run] / 2)
                rows.append((run, cls, np.log(ratio), noise))
    columns = np.array(rows, float).reshape(-1, 4).T
    steps = [c.metrics[0] for c in comparisons]
    return Evidence(
        run=columns[0].astype(int),
        cls=columns[1].astype(int),
        log_measured=columns[2],
        noise=columns[3],
        seconds=seconds,
        calls=share,
        log_step=np.log([s.measured / s.predicted for s in steps]),
        step_s=np.array([s.predicted for s in steps]),
        run_std=mood,
    )


def _run_std(noise_floor: float | None) -> float:
    """Returns the scatter (log) of runs, at least what is usual."""
    return max(RUN_STD, _of_floor(noise_floor))


def _of_floor(noise_floor: float | None) -> float:
    """Returns the scatter (log) of runs: two runs of one plan differ by 1.4 times as much."""
    return math.log1p(noise_floor or 0.0) / math.sqrt(2)


def twins_log_std(measurements: Sequence[Measurement]) -> float:
    """Returns the scatter (log) of runs of one plan as launches saw it, the median over runs.

    0 where no launch ran a plan twice.
    """
    floors = [m.noise_floor for m in measurements if m.noise_floor is not None]
    return _of_floor(median(floors)) if floors else 0.0


def applied(calibration: Calibration, share: Array) -> Array:
    """Returns what factors and calls multiply the curves by, [runs, classes]."""
    factors = np.array([calibration.factors.get(c, 1.0) for c in CLASSES])
    call = np.array([calibration.call_s.get(p, 0.0) for p in PHASES])
    return np.asarray(factors * (1.0 + share * by_class(call)))


def by_class(call: Array) -> Array:
    """Returns by class the call that its phase has, 0 where it has none: [classes]."""
    return np.asarray(np.where(_CALL_OF_CLASS >= 0, call[_CALL_OF_CLASS], 0.0))
