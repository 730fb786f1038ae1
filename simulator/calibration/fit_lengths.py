"""Which law completions' lengths follow, and how sure its parameters are.

Maximum likelihood with lengths that were cut (an attempt that reached the cap, or was still
running) counted as "at least that long"; of the laws the one with the smallest AIC (Akaike
1974). Uncertainty is the inverse of the observed information.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from flopwright.errors import InputError
from flopwright.report.metrics import Interval
from flopwright.simulator.calibration.least_squares import Array
from flopwright.spec.rollouts.lengths import (
    ExponentialLengths,
    LengthSpec,
    LognormalLengths,
    ParetoLengths,
)

Bools = NDArray[np.bool_]

_STEP: Final = 1e-4
_ITERATIONS: Final = 200
_LEAST_SIGMA: Final = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFit:
    """A law and its parameters.

    Attributes:
        law: as a scenario states it; params: by name; std: their standard deviations.
        log_likelihood, aic: of the samples under it.
        samples, censored: how many lengths there were, and how many of them were cut.
    """

    law: LengthSpec
    params: dict[str, float]
    std: dict[str, float]
    log_likelihood: float
    aic: float
    samples: int
    censored: int

    def quantile(self, probability: float) -> float:
        """Returns the length below which that share of attempts stays, before the cap."""
        return _QUANTILES[self.law.kind](self.params, probability)

    def interval(self, probability: float = 0.8) -> Interval:
        """Returns the central interval of one attempt's length."""
        low, high = (1 - probability) / 2, (1 + probability) / 2
        return Interval(low=self.quantile(low), high=self.quantile(high), probability=probability)


def fit_lengths(
    samples: ArrayLike, censored: ArrayLike | None = None, cap: int | None = None
) -> LengthFit:
    """Returns the law that explains the lengths best.

    Args:
        samples: tokens of attempts, above zero.
        censored: true for attempts that were cut; None: those at `cap`, if there is one.
        cap: the longest completion allowed.

    Raises:
        InputError: fewer than five lengths that were not cut, or some that are no lengths.
    """
    x = np.asarray(samples, float)
    cut = np.zeros(x.shape, bool) if censored is None else np.asarray(censored, bool)
    if censored is None and cap is not None:
        cut = x >= cap
    if x.shape != cut.shape or not np.isfinite(x).all() or (x <= 0).any():
        raise InputError("lengths must be finite and above zero, each cut or not")
    if (~cut).sum() < 5:
        raise InputError("five lengths at least must have ended by themselves to fit their law")
    fits = [_exponential(x, cut, cap), _lognormal(x, cut, cap), _pareto(x, cut, cap)]
    return min(fits, key=lambda f: f.aic)


def _exponential(x: Array, cut: Bools, cap: int | None) -> LengthFit:
    ended = float((~cut).sum())
    mean = float(x.sum()) / ended
    likelihood = -ended * math.log(mean) - float(x.sum()) / mean
    law = ExponentialLengths(mean=round(max(mean, 1)), cap=cap)
    std = {"mean": mean / math.sqrt(ended)}
    return _made(law, {"mean": mean}, std, likelihood, 1, cut)


def _lognormal(x: Array, cut: Bools, cap: int | None) -> LengthFit:
    logs = np.log(x)

    def negative(p: Array) -> float:
        mu, sigma = float(p[0]), math.exp(float(p[1]))
        z = (logs - mu) / sigma
        ended = -0.5 * z[~cut] ** 2 - math.log(sigma) - 0.5 * math.log(2 * math.pi) - logs[~cut]
        return -float(ended.sum() + _log_survival(z[cut]).sum())

    start = np.array([logs[~cut].mean(), math.log(max(float(logs[~cut].std()), _LEAST_SIGMA))])
    best, covariance = _minimised(negative, start)
    mu, sigma = float(best[0]), math.exp(float(best[1]))
    std = {"mu": math.sqrt(covariance[0, 0]), "sigma": sigma * math.sqrt(covariance[1, 1])}
    mean = math.exp(min(mu + sigma**2 / 2, 20.0))
    law = LognormalLengths(mean=round(max(mean, 1)), sigma=min(max(sigma, 1e-3), 10), cap=cap)
    return _made(law, {"mu": mu, "sigma": sigma}, std, -negative(best), 2, cut)


def _pareto(x: Array, cut: Bools, cap: int | None) -> LengthFit:
    least, ended = float(x.min()), float((~cut).sum())
    alpha = ended / max(float(np.log(x / least).sum()), 1e-12)
    logs = np.log(x[~cut])
    likelihood = (
        ended * math.log(alpha) - float(logs.sum()) - alpha * float(np.log(x / least).sum())
    )
    law = ParetoLengths(minimum=round(max(least, 1)), alpha=min(max(alpha, 1.02), 100), cap=cap)
    params = {"minimum": least, "alpha": alpha}
    std = {"minimum": least / (ended * alpha), "alpha": alpha / math.sqrt(ended)}
    return _made(law, params, std, likelihood, 2, cut)


def _made(
    law: LengthSpec,
    params: dict[str, float],
    std: dict[str, float],
    likelihood: float,
    free: int,
    cut: Bools,
) -> LengthFit:
    return LengthFit(
        law=law,
        params=params,
        std=std,
        log_likelihood=likelihood,
        aic=2 * free - 2 * likelihood,
        samples=len(cut),
        censored=int(cut.sum()),
    )


def _log_survival(z: Array) -> Array:
    """Returns log P(Z > z) of the normal; far out by its asymptotic form."""
    normal = NormalDist()
    near = [math.log(max(1 - normal.cdf(v), 1e-300)) for v in np.minimum(z, 6.0)]
    far = -0.5 * z**2 - np.log(np.maximum(z, 6.0) * math.sqrt(2 * math.pi))
    return np.where(z > 6.0, far, near) if len(z) else np.zeros(0)


def _minimised(negative: Callable[[Array], float], start: Array) -> tuple[Array, Array]:
    """Returns the minimum by damped Newton steps, and the inverse of the curvature there."""
    p, value, damping = start.copy(), negative(start), 1e-3
    for _ in range(_ITERATIONS):
        gradient, hessian = _derivatives(negative, p)
        step = np.linalg.solve(hessian + damping * np.eye(len(p)), -gradient)
        trial = negative(p + step)
        if math.isfinite(trial) and trial <= value:
            done = value - trial < 1e-10 * (1 + abs(value))
            p, value, damping = p + step, trial, damping / 4
            if done:
                break
        else:
            damping = max(damping * 8, 1e-6)
            if damping > 1e12:
                break
    _, hessian = _derivatives(negative, p)
    return p, np.asarray(np.linalg.pinv(hessian), float)


def _derivatives(of: Callable[[Array], float], p: Array) -> tuple[Array, Array]:
    size = len(p)
    eye = np.eye(size) * _STEP
    centre = of(p)
    gradient, hessian = np.zeros(size), np.zeros((size, size))
    ahead = [of(p + e) for e in eye]
    behind = [of(p - e) for e in eye]
    for i in range(size):
        gradient[i] = (ahead[i] - behind[i]) / (2 * _STEP)
        hessian[i, i] = (ahead[i] - 2 * centre + behind[i]) / _STEP**2
        for j in range(i):
            both = of(p + eye[i] + eye[j]) - of(p + eye[i] - eye[j])
            both += of(p - eye[i] - eye[j]) - of(p - eye[i] + eye[j])
            hessian[i, j] = hessian[j, i] = both / (4 * _STEP**2)
    return gradient, hessian


_QUANTILES: Final[dict[str, Callable[[dict[str, float], float], float]]] = {
    "exponential": lambda p, q: -p["mean"] * math.log(1 - q),
    "lognormal": lambda p, q: math.exp(p["mu"] + p["sigma"] * NormalDist().inv_cdf(q)),
    "pareto": lambda p, q: p["minimum"] * (1 - q) ** (-1 / p["alpha"]),
}
