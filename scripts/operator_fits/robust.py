"""A robust fit of one curve in log time, and what it is worth on shapes it has not seen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import least_squares

from flopwright.simulator.calibration.model import EfficiencyCurve
from flopwright.simulator.operators.forms import efficiency
from operator_fits.tables import Floats, Points

# Starting values, and whether the parameter is a share (fitted as a logit) or a size (as a log).
_START = {
    "memory_efficiency": 0.8, "beside_efficiency": 0.6,
    "half_m": 30.0, "half_k": 60.0, "half_n": 30.0, "half_rows": 4000.0,
    "floor_s": 4e-6, "decline_flops": 1e12, "decline_power": 0.05,
}  # fmt: skip
_SHARES = frozenset({"max_efficiency", "memory_efficiency", "beside_efficiency"})
_MOST_POINTS = 4000
# A size that halves nothing at any shape in the tables is left out.
_LEAST_POWER = 1e-3
# No kernel is shorter, in a graph or not.
_LEAST_FLOOR_S = 1e-6
_NEGLIGIBLE = {"half_m": 1.0, "half_k": 1.0, "half_n": 1.0, "half_rows": 50.0}


@dataclass(frozen=True)
class Limits:
    """FLOP/s of efficiency 1, bytes/s of share 1, and the largest efficiency to be found."""

    peak: float
    bandwidth: float
    ceiling: float = 1.0


@dataclass(frozen=True)
class Fit:
    """A curve with what it was worth.

    Attributes:
        beside_efficiency: share of the bandwidth of the kernels beside the products.
        residual_log: standard deviation of log(measured / fitted), weighted, of all points.
        errors: |fitted / measured - 1| on held-out shapes by form ("flat", "smooth", ...).
    """

    curve: EfficiencyCurve
    beside_efficiency: float
    residual_log: float
    points: int
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)


def seconds_of(curve: EfficiencyCurve, beside: float, points: Points, limits: Limits) -> Floats:
    """Returns the fitted seconds of every point."""
    peak, bandwidth = limits.peak, limits.bandwidth
    total = np.full_like(points.seconds, curve.floor_s)
    for part in points.parts:
        share = efficiency(curve, part.m, part.k, part.n, rows=points.rows, flops=part.flops)
        compute = np.where(part.flops > 0, part.flops / (peak * share), 0.0)
        total = total + np.maximum(compute, part.nbytes / (bandwidth * curve.memory_efficiency))
    return np.asarray(total + points.beside_bytes / (bandwidth * beside))


def _curve(template: EfficiencyCurve, values: dict[str, float]) -> EfficiencyCurve:
    mine = {k: v for k, v in values.items() if k != "beside_efficiency"}
    return template.model_copy(update=mine)


def _decode(names: tuple[str, ...], vector: Floats, ceiling: float) -> dict[str, float]:
    values = {
        name: float(1 / (1 + np.exp(-x)) if name in _SHARES else np.exp(np.clip(x, -60, 60)))
        for name, x in zip(names, vector, strict=True)
    }
    if "max_efficiency" in values:
        values["max_efficiency"] *= ceiling
    if "floor_s" in values:
        values["floor_s"] += _LEAST_FLOOR_S
    return values


def _encode(names: tuple[str, ...], points: Points, limits: Limits) -> Floats:
    """Returns where the search starts: the largest efficiency a little above the usual one."""
    judged = points.weight >= 1
    work = sum(p.flops[judged] for p in points.parts)
    seen = float(np.median(work / (limits.peak * points.seconds[judged])))
    start = _START | {"max_efficiency": float(np.clip(1.2 * seen / limits.ceiling, 0.01, 0.9))}
    return np.array(
        [np.log(start[n] / (1 - start[n])) if n in _SHARES else np.log(start[n]) for n in names]
    )


def _solve(
    template: EfficiencyCurve, names: tuple[str, ...], points: Points, limits: Limits
) -> tuple[EfficiencyCurve, float]:
    """Returns the curve and the share beside it that make log errors smallest."""
    log_s, weight = np.log(points.seconds), points.weight
    ceiling = limits.ceiling

    def errors(vector: Floats) -> Floats:
        values = _decode(names, vector, ceiling)
        beside = values.get("beside_efficiency", 1.0)
        fitted = seconds_of(_curve(template, values), beside, points, limits)
        return np.asarray((np.log(fitted) - log_s) * weight)

    found = least_squares(
        errors, _encode(names, points, limits), loss="soft_l1", f_scale=0.1, max_nfev=80
    )
    values = {k: _rounded(v) for k, v in _decode(names, found.x, ceiling).items()}
    if values.get("decline_power", 1.0) < _LEAST_POWER:
        values |= {"decline_power": 0.0, "decline_flops": 1e12}
    for name, least in _NEGLIGIBLE.items():
        if values.get(name, least) < least:
            values[name] = 0.0
    return _curve(template, values), values.get("beside_efficiency", 1.0)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _sample(points: Points, seed: int) -> Points:
    seen = np.flatnonzero(~points.held)
    if len(seen) > _MOST_POINTS:
        seen = np.random.default_rng(seed).choice(seen, _MOST_POINTS, replace=False)
    return points.take(seen)


def error_of(
    curve: EfficiencyCurve, beside: float, points: Points, limits: Limits
) -> tuple[float, float]:
    """Returns median and 90th percentile of |fitted / measured - 1| over full-weight points."""
    judged = points.take(points.weight >= 1)
    fitted = seconds_of(curve, beside, judged, limits)
    error = np.abs(fitted / judged.seconds - 1)
    return float(np.median(error)), float(np.quantile(error, 0.9))


def fit(
    template: EfficiencyCurve, forms: dict[str, tuple[str, ...]], points: Points, limits: Limits
) -> Fit:
    """Returns the form that has earned its parameters, with the held-out errors of all.

    The first form is a baseline that is never taken unless it is the only one; of the others
    a richer one is taken where it lowers median + p90 / 4 on held-out shapes by 2 % (so that
    the error of the form taken is a little optimistic where two are close).

    Args:
        template: kind, dtype and what else is not fitted.
        forms: names of the fitted parameters by form, the plainest first.
        points: all points; those held out are only judged on.
        limits: what shares are shares of.
    """
    seen, held = _sample(points, 0), points.take(points.held)
    errors: dict[str, tuple[float, float]] = {}
    best, best_score = (template, 1.0), np.inf
    for i, (form, names) in enumerate(forms.items()):
        found = _solve(template, names, seen, limits)
        errors[form] = error_of(*found, held, limits)
        score = errors[form][0] + errors[form][1] / 4
        if i == 0 and len(forms) > 1:
            continue
        if score < 0.98 * best_score:
            best, best_score = found, score
            errors["taken"] = errors[form]
    fitted = seconds_of(*best, points, limits)
    log_error = np.log(points.seconds / fitted)
    spread = _rounded(float(np.sqrt(np.average(log_error**2, weights=points.weight))))
    return Fit(*best, spread, len(points.seconds), errors)
