from __future__ import annotations

import numpy as np
import pytest
import scipy.optimize

from flopwright.simulator.calibration.least_squares import Prior, robust_fit


def test_wide_priors_give_scipys_huber_solution() -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(0, 3, 60)
    y = np.exp(0.7 * x) + 2.0 + rng.normal(0, 0.1, 60)
    y[::11] += 4.0  # outliers

    def residuals(p: np.ndarray) -> np.ndarray:
        return np.exp(p[0] * x) + p[1] - y

    start = np.array([0.5, 0.0])
    ours = robust_fit(residuals, start, Prior(start, np.full(2, 1e6)), np.full(60, 0.1))
    theirs = scipy.optimize.least_squares(
        lambda p: residuals(p) / 0.1, start, loss="huber", f_scale=1.345, xtol=1e-14, ftol=1e-14
    )
    np.testing.assert_allclose(ours.params, theirs.x, rtol=1e-4)
    assert (ours.weights[::11] < 0.1).all()
    assert np.median(ours.weights) == 1.0


def test_the_posterior_of_a_linear_model_is_the_closed_form() -> None:
    rng = np.random.default_rng(2)
    design, y = rng.normal(size=(8, 3)), rng.normal(size=8) * 0.1
    mean, std, noise = np.array([0.1, -0.2, 0.0]), np.array([0.5, 1.0, 2.0]), np.full(8, 1.0)
    fit = robust_fit(lambda p: design @ p - y, mean, Prior(mean, std), noise)
    precision = design.T @ design + np.diag(std**-2)
    expected = np.linalg.solve(precision, design.T @ y + mean / std**2)
    np.testing.assert_allclose(fit.params, expected, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(fit.covariance, np.linalg.inv(precision), rtol=1e-5)


def test_without_data_the_prior_stays() -> None:
    prior = Prior(np.array([1.5]), np.array([0.25]))
    fit = robust_fit(lambda _: np.zeros(0), prior.mean, prior, np.zeros(0))
    assert fit.params[0] == pytest.approx(1.5)
    assert fit.covariance[0, 0] == pytest.approx(0.0625)
