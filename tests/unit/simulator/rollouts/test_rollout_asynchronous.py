"""Staleness of fully asynchronous loops: what is a bound and what is not, and the closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.simulator.rollouts.asynchronous import (
    admission,
    mean_updates_crossed,
    queue_loop,
)
from flopwright.simulator.rollouts.layouts_identity import queue_staleness

BATCH, CONCURRENT = 16, 48


def heavy(count: int = 40_000, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).pareto(1.5, count) + 1


def run(max_lag, order="submission", rule="none", versions=400, train_s=1.0, seed=0):
    return admission(
        heavy(seed=seed), batch=BATCH, concurrent=CONCURRENT, versions=versions,
        train_s=train_s, max_lag=max_lag, order=order, rule=rule,
    )  # fmt: skip


@pytest.mark.parametrize("max_lag", [0, 1, 4])
def test_in_order_of_submission_the_lag_is_bounded(max_lag):
    report = run(max_lag)
    assert report.lags.max() <= max_lag
    assert len(report.lags) == 400 * BATCH


@pytest.mark.parametrize("max_lag", [1, 4])
def test_in_order_of_completion_stragglers_exceed_it_and_order_costs_head_of_line_blocking(
    max_lag,
):
    loose, strict = run(max_lag, order="completion"), run(max_lag)
    assert loose.lags.max() > 10 * max_lag
    assert abs(loose.lags.mean() - max_lag) < 0.15 * max_lag + 0.1
    assert strict.seconds_per_version > 2 * loose.seconds_per_version


@pytest.mark.parametrize("max_lag", [1, 2, 4])
def test_waiting_and_dropping_are_hard_bounds_too(max_lag):
    waiting = run(max_lag, order="completion", rule="wait")
    dropping = run(max_lag, order="completion", rule="drop")
    assert waiting.lags.max() <= max_lag
    assert waiting.dropped == 0
    assert dropping.lags.max() <= max_lag
    assert dropping.dropped > 0
    assert dropping.seconds_per_version < waiting.seconds_per_version


def test_no_lag_allowed_is_the_synchronous_schedule():
    report = run(0, versions=50, train_s=3.0)
    durations, seconds = heavy(), 0.0
    for version in range(50):
        seconds += durations[version * BATCH : (version + 1) * BATCH].max() + 3.0
    assert report.seconds == pytest.approx(seconds)
    assert (report.lags == 0).all()


def test_without_a_limit_the_slower_side_sets_the_pace():
    slow_trainer = run(None, order="completion", train_s=20.0, versions=60)
    assert slow_trainer.seconds_per_version == pytest.approx(20.0, rel=0.02)
    fast_trainer = admission(
        np.random.default_rng(1).exponential(1.0, 40_000), batch=BATCH, concurrent=CONCURRENT,
        versions=600, train_s=1e-6, max_lag=None, order="completion",
    )  # fmt: skip
    assert fast_trainer.seconds_per_version == pytest.approx(BATCH / CONCURRENT, rel=0.05)
    lag, sigma = fast_trainer.lags[2000:].mean(), fast_trainer.lags.std() / 50
    assert abs(lag - mean_updates_crossed(CONCURRENT, BATCH)) <= 5 * sigma + 0.5


def _groups(tail_sigma: float = 0.265, size: int = 8) -> np.ndarray:
    rng = np.random.default_rng(3)
    return rng.lognormal(-(tail_sigma**2) / 2, tail_sigma, (40_000, size))


@pytest.mark.parametrize(
    ("concurrent", "batch", "queue", "rho", "tail", "measured"),
    [
        (120, 240, 2, 0.63, 1.42, 1.26),
        (240, 120, 2, 0.92, 1.43, 3.59),
        (128, 128, 2, 1.07, 1.44, 3.09),
        (240, 120, 1, 0.86, 1.42, 3.40),
        (120, 120, 1, 0.67, 1.42, 1.92),
        (128, 128, 1, 1.14, 1.45, 2.01),
    ],
)
def test_published_runs_within_three_tenths_of_a_version(
    concurrent, batch, queue, rho, tail, measured
):
    """Closed form with each run's own tail, and simulation; measured by Applied Compute."""
    samples = _groups()
    drawn = samples.max(axis=1).mean() / samples.mean()
    assert drawn == pytest.approx(1.42, abs=0.01)
    closed = queue_staleness(concurrent, batch, queue, rho, tail)
    report = queue_loop(
        samples, concurrent=concurrent, batch=batch, queue_batches=queue,
        train_s=rho * batch / concurrent, versions=500,
    )  # fmt: skip
    simulated = report.lags[len(report.lags) // 10 :].mean()
    # what was published has two decimals
    assert round(abs(closed - measured), 2) <= 0.3
    assert abs(simulated - queue_staleness(concurrent, batch, queue, rho, drawn)) <= 0.2
    assert abs(simulated - measured) <= 0.4
