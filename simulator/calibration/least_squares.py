"""Robust least squares with priors, in numpy: what every fit of a calibration goes through.

Minimises sum_i rho((residual_i(p)) / noise_i) + sum_j ((p_j - mean_j) / std_j)^2 over p, with
Huber's rho (quadratic to `_HUBER` deviations, linear beyond), by reweighted
Levenberg-Marquardt steps on a numerical Jacobian.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Where Huber's loss turns linear: 95 % as efficient as least squares on normal noise.
_HUBER: Final = 1.345
_STEP: Final = 1e-5
_ITERATIONS: Final = 200


@dataclass(frozen=True, slots=True)
class Prior:
    """Normal prior of each parameter."""

    mean: Array
    std: Array


@dataclass(frozen=True, slots=True)
class Fit:
    """The parameters found, their covariance (Laplace), and the residuals there.

    Attributes:
        weights: by residual: 1 inside Huber's bound, less for outliers.
        cost: the minimised sum.
    """

    params: Array
    covariance: Array
    residuals: Array
    weights: Array
    cost: float


def robust_fit(
    residuals: Callable[[Array], Array], start: Array, prior: Prior, noise: Array
) -> Fit:
    """Returns the fit from one starting point.

    Args:
        residuals: from parameters to residuals (the length must not change).
        start: parameters to begin at.
        prior: of the parameters; it also keeps what the data do not decide in place.
        noise: standard deviation of each residual, above zero.
    """
    params, damping = start.copy(), 1e-3
    found = residuals(params)
    cost = _cost(found / noise, params, prior)
    for _ in range(_ITERATIONS):
        hessian, gradient = _normal_equations(residuals, params, found, prior, noise)
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), -gradient)
        trial = params + step
        trial_found = residuals(trial)
        trial_cost = _cost(trial_found / noise, trial, prior)
        if np.isfinite(trial_cost) and trial_cost <= cost:
            done = cost - trial_cost < 1e-12 * (1 + cost)
            params, found, cost, damping = trial, trial_found, trial_cost, damping / 3
            if done:
                break
        else:
            damping *= 4
            if damping > 1e12:
                break
    hessian, _ = _normal_equations(residuals, params, found, prior, noise)
    return Fit(
        params,
        np.asarray(np.linalg.inv(hessian), float),
        found,
        _huber_weights(found / noise),
        cost,
    )


def _huber_weights(scaled: Array) -> Array:
    return np.asarray(np.minimum(1.0, _HUBER / np.maximum(np.abs(scaled), 1e-300)))


def _cost(scaled: Array, params: Array, prior: Prior) -> float:
    size = np.abs(scaled)
    rho = np.where(size <= _HUBER, size**2, 2 * _HUBER * size - _HUBER**2)
    return float(rho.sum() + (((params - prior.mean) / prior.std) ** 2).sum())


def _normal_equations(
    residuals: Callable[[Array], Array], params: Array, found: Array, prior: Prior, noise: Array
) -> tuple[Array, Array]:
    jacobian = np.stack(
        [(residuals(params + _STEP * e) - found) / _STEP for e in np.eye(len(params))], axis=1
    )
    weight = _huber_weights(found / noise) / noise**2
    hessian = jacobian.T @ (jacobian * weight[:, None]) + np.diag(prior.std**-2)
    gradient = jacobian.T @ (weight * found) + (params - prior.mean) / prior.std**2
    return np.asarray(hessian), np.asarray(gradient)
