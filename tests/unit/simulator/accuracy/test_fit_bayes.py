"""The estimator against closed forms of ridge regression and a brute-force Huber minimum."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

from flopwright.ops import Array
from flopwright.simulator.accuracy.fit_bayes import HUBER, Residuals, robust_map


def linear(design: Array, target: Array) -> Residuals:
    return lambda theta: (design @ theta - target, design)


def test_inside_hubers_bound_it_is_ridge_regression() -> None:
    rng = np.random.default_rng(3)
    design, truth = rng.normal(size=(40, 4)), np.array([0.3, -0.2, 0.1, 0.0])
    target = design @ truth + 0.01 * rng.normal(size=40)
    mean, std, sigma = np.full(4, 0.05), np.array([0.1, 0.2, 0.3, 0.4]), 0.5
    weights = rng.uniform(0.2, 2.0, 40)
    found = robust_map(linear(design, target), weights, sigma, mean, std, np.zeros(4))
    precision = design.T @ (design * weights[:, None]) / sigma**2 + np.diag(std**-2)
    right = design.T @ (weights * target) / sigma**2 + mean / std**2
    assert found.theta == pytest.approx(np.linalg.solve(precision, right), abs=1e-9)
    assert found.covariance == pytest.approx(np.linalg.inv(precision), rel=1e-9)


def test_an_outlier_pulls_no_more_than_hubers_bound() -> None:
    target = np.array([0.0, 0.01, -0.01, 0.02, 5.0])
    design = np.ones((5, 1))
    mean, std = np.zeros(1), np.full(1, 10.0)
    found = robust_map(linear(design, target), np.ones(5), 0.02, mean, std, np.full(1, 2.0))

    def cost(x: float) -> float:
        size = np.abs(x - target) / 0.02
        rho = np.where(size <= HUBER, size**2, 2 * HUBER * size - HUBER**2)
        return float(rho.sum() + (x / 10) ** 2)

    best = scipy.optimize.minimize_scalar(cost, bounds=(-1, 5), method="bounded")
    assert found.theta[0] == pytest.approx(best.x, abs=1e-4)
    assert abs(found.theta[0]) < 0.03


def test_a_parameter_that_no_run_touches_keeps_its_prior() -> None:
    design = np.array([[1.0, 0.0], [1.0, 0.0]])
    found = robust_map(
        linear(design, np.array([0.1, 0.1])),
        np.ones(2),
        0.05,
        np.array([0.0, 0.7]),
        np.array([0.2, 0.3]),
        np.zeros(2),
    )
    assert found.theta[1] == pytest.approx(0.7)
    assert found.covariance[1, 1] == pytest.approx(0.09)
    # two runs at noise 0.05 against a prior of 0.2: shrunk by 800 / 825
    assert found.theta[0] == pytest.approx(0.1 * 800 / 825)


def test_curved_residuals_converge() -> None:
    x = np.array([0.5, 1.0, 2.0, 3.0])
    target = np.log(2.0 * x + np.exp(0.3))

    def residuals(theta: Array) -> tuple[Array, Array]:
        a, b = np.exp(theta)
        total = a * x + b
        return np.log(total) - target, np.stack([a * x / total, b / total], axis=1)

    found = robust_map(residuals, np.ones(4), 0.01, np.zeros(2), np.full(2, 5.0), np.zeros(2))
    assert found.theta == pytest.approx([np.log(2.0), 0.3], abs=1e-4)
