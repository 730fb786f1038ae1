"""Factors of memory classes from measured runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import numpy as np

from flopwright.report.compare import ClassComparison, Comparison, memory_comparisons
from flopwright.report.metrics import Measurement
from flopwright.simulator.calibration.least_squares import Array, Prior, robust_fit
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.calibration.repredict import memory_as_routed

_MEMORY_STD: Final = 0.1
_MEMORY_NOISE: Final = 0.02
# A class of so small a share of the memory says nothing about its factor.
_LEAST: Final = 0.01


def memory_factors(
    calibration: Calibration, measurements: Sequence[Measurement], found: Sequence[Comparison]
) -> dict[str, float]:
    """Returns factors of memory classes: those of `calibration`, corrected by what runs held.

    Where experts got more rows than the mean, bytes are held against those rows.

    Args:
        calibration: what the comparisons `found` of the measurements were made with.
    """
    ratios: dict[str, list[float]] = {}
    for measurement, comparison in zip(measurements, found, strict=True):
        classes = _classes(calibration, measurement, comparison)
        least = _LEAST * sum(c.measured for c in classes)
        for item in classes:
            if min(item.predicted, item.measured) > least:
                ratios.setdefault(item.name, []).append(np.log(item.measured / item.predicted))
    return corrected(calibration.memory_factors, ratios)


def _classes(
    calibration: Calibration, measurement: Measurement, comparison: Comparison
) -> tuple[ClassComparison, ...]:
    if not measurement.expert_rows:
        return comparison.memory_classes
    return memory_comparisons(memory_as_routed(calibration, measurement), measurement.metrics)


def corrected(
    known: Mapping[str, float], ratios: Mapping[str, Sequence[float]]
) -> dict[str, float]:
    """Returns the factors times what log ratios of measured over predicted say, drawn toward 1."""
    factors = dict(known)
    for name, logs in sorted(ratios.items()):
        fit = robust_fit(
            partial(_offsets, np.array(logs)),
            np.zeros(1),
            Prior(np.zeros(1), np.full(1, _MEMORY_STD)),
            np.full(len(logs), _MEMORY_NOISE),
        )
        factors[name] = known.get(name, 1.0) * float(np.exp(fit.params[0]))
    return factors


def _offsets(logs: Array, params: Array) -> Array:
    return np.asarray(params[0] - logs)
