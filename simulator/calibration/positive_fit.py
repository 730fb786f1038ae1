"""Seconds as a sum of positive terms: fixed + per token + per byte, and how sure that is.

    seconds_i = sum_j c_j x_ij * exp(noise_i),   c_j > 0

Fitted in the logarithm (timing noise is a factor), robust to outliers, each coefficient
with a log-normal prior so that terms the data do not show stay small, and said to be unsure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from flopwright.errors import InputError
from flopwright.report.metrics import Interval
from flopwright.simulator.calibration.interval import student_t_quantile
from flopwright.simulator.calibration.least_squares import Array, Fit, Prior, robust_fit

# Scatter of one measurement before any was seen, worth one of them.
_SCATTER: Final = 0.1
_SCATTER_DOF: Final = 1.0
# A term is known to three orders of magnitude before it is measured.
_WIDE: Final = math.log(30.0)
_MANY: Final = 10
_TINY: Final = 1e-18
_ROUNDS: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PositiveFit:
    """The terms found.

    Attributes:
        names: of the terms; coefficients: seconds for one unit of each.
        log_covariance: of the coefficients' logarithms.
        residual_log: standard deviation of log(measured / fitted) of a new measurement.
        dof: degrees of freedom behind it.
        domain: smallest and largest value of each term among the points.
    """

    names: tuple[str, ...]
    coefficients: Array
    log_covariance: Array
    residual_log: float
    dof: float
    domain: tuple[tuple[float, float], ...]

    @property
    def by_name(self) -> dict[str, float]:
        """Coefficients by name."""
        return dict(zip(self.names, self.coefficients.tolist(), strict=True))

    @property
    def log_std(self) -> dict[str, float]:
        """Standard deviation of each coefficient's logarithm."""
        deviations = np.sqrt(np.diag(self.log_covariance))
        return dict(zip(self.names, deviations.tolist(), strict=True))

    def predict(self, *terms: ArrayLike) -> Array:
        """Returns the seconds at these terms (they broadcast)."""
        return np.asarray(sum(c * np.asarray(x, float) for c, x in self._pairs(terms)))

    def interval(self, *terms: float, probability: float = 0.8) -> Interval:
        """Returns the central interval of one measurement at these terms.

        Beyond the points' domain it grows by what the sum would change by with the distance.
        """
        parts = self.coefficients * np.array(terms, float)
        total = float(parts.sum())
        shares = parts / max(total, _TINY)
        variance = float(shares @ self.log_covariance @ shares) + self.residual_log**2
        deviation = math.hypot(math.sqrt(variance), self._beyond(terms))
        spread = math.exp(student_t_quantile((1 + probability) / 2, self.dof) * deviation)
        return Interval(low=total / spread, high=total * spread, probability=probability)

    def extrapolates(self, *terms: float) -> bool:
        """Returns whether a term lies outside the points."""
        return self._beyond(terms) > 0

    def _beyond(self, terms: Sequence[float]) -> float:
        """Returns a tenth for every factor of e that a term lies outside of the points."""
        out = 0.0
        for x, (low, high) in zip(terms, self.domain, strict=True):
            if x > high > 0:
                out += math.log(x / high)
            elif 0 < x < low:
                out += math.log(low / x)
        return 0.1 * out

    def _pairs(self, terms: Sequence[ArrayLike]) -> list[tuple[float, ArrayLike]]:
        assert len(terms) == len(self.names), "one value a term"
        return list(zip(self.coefficients.tolist(), terms, strict=True))


def fit_positive(
    terms: Mapping[str, ArrayLike], seconds: ArrayLike, guess: Mapping[str, float] | None = None
) -> PositiveFit:
    """Returns the sum of terms that explains the seconds.

    Args:
        terms: values of each term by point; a constant is ones.
        seconds: measured, above zero.
        guess: coefficients known before (a public prior, another machine's), to a factor 30.

    Raises:
        InputError: fewer than two points, or numbers that are not finite and positive.
    """
    names = tuple(terms)
    measured = np.asarray(seconds, float)
    x = np.stack([np.broadcast_to(np.asarray(terms[n], float), measured.shape) for n in names])
    if measured.size < 2:
        raise InputError("two measurements at least are needed to fit a time")
    if not (np.isfinite(measured).all() and (measured > 0).all() and np.isfinite(x).all()):
        raise InputError("measured seconds must be finite and above zero")
    mean = np.log([(guess or {}).get(n) or _first_guess(v, measured) for n, v in zip(names, x,
                   strict=True)])  # fmt: skip
    prior = Prior(mean=mean, std=np.full(len(names), _WIDE))
    logs = np.log(measured)

    def residuals(p: Array) -> Array:
        return np.asarray(np.log(np.maximum(np.exp(p) @ x, _TINY)) - logs)

    scatter, fit = _SCATTER, None
    for _ in range(_ROUNDS):
        starts = [mean if fit is None else fit.params, *_apart(mean)]
        fits = [robust_fit(residuals, s, prior, np.full(len(logs), scatter)) for s in starts]
        fit = min(fits, key=lambda f: f.cost)
        freed = max(float(fit.weights.sum()) - len(names), 1.0)
        total = _SCATTER_DOF * _SCATTER**2 * _pull(freed) + freed * _variance(fit, len(names))
        before, scatter = scatter, math.sqrt(total / (_SCATTER_DOF * _pull(freed) + freed))
        if abs(math.log(scatter / before)) < 1e-2:
            break
    assert fit is not None
    return PositiveFit(
        names=names,
        coefficients=np.exp(fit.params),
        log_covariance=fit.covariance,
        residual_log=scatter,
        dof=_SCATTER_DOF + freed,
        domain=tuple((float(v.min()), float(v.max())) for v in x),
    )


def _variance(fit: Fit, terms: int) -> float:
    """Returns the residuals' variance: of many points that of the middle half, which outliers
    do not move; of few the weighted mean square.
    """
    count = len(fit.residuals)
    if count >= _MANY:
        typical = 1.4826 * float(np.median(np.abs(fit.residuals)))
        return typical**2 * count / (count - terms)
    freed = max(float(fit.weights.sum()) - terms, 1.0)
    return float((fit.weights * fit.residuals**2).sum()) / freed


def _pull(freed: float) -> float:
    """Returns how much the scatter's prior counts: less and less with many points."""
    return 1.0 / (1.0 + freed / 3.0)


def _first_guess(values: Array, seconds: Array) -> float:
    """Returns a third of the time over the term, the median: as if three terms shared it."""
    some = values > 0
    if not some.any():
        return 1e-9
    return float(np.median(seconds[some] / values[some])) / 3


def _apart(mean: Array) -> list[Array]:
    """Returns starts in which one term alone is large: sums have several valleys."""
    return [mean + np.where(np.arange(len(mean)) == i, 1.0, -3.0) for i in range(len(mean))]
