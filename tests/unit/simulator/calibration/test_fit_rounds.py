"""Hidden engines, laws and links behind synthetic rounds: found within what the fit says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from flopwright.errors import InputError
from flopwright.report.metrics import StageMetrics
from flopwright.report.records import RoundSample
from flopwright.simulator.calibration.fit_lengths import fit_lengths
from flopwright.simulator.calibration.fit_rounds import (
    decode_step,
    fit_decode,
    fit_rounds,
    fit_stages,
    fit_sync,
)
from flopwright.spec.rollouts.lengths import LognormalLengths


def _steps(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    batch = np.exp(rng.uniform(0, np.log(256), count))
    return batch, batch * np.exp(rng.uniform(np.log(1e3), np.log(3e4), count))


def test_decode_terms_are_found_among_outliers_and_intervals_cover() -> None:
    rng, inside, errors = np.random.default_rng(0), [], []
    for _ in range(40):
        a, c, kappa = np.exp(rng.normal(np.log([1e-2, 1e-4, 1e-8]), 0.5))
        batch, context = _steps(rng, 40)
        seconds = (a + c * batch + kappa * context) * np.exp(rng.normal(0, 0.05, 40))
        seconds[::10] *= 2.5
        fit = fit_decode(batch, context, seconds)
        sigma = np.array(list(fit.log_std.values()))
        errors.append(np.log(fit.coefficients / [a, c, kappa]) / np.maximum(sigma, 0.02))
        for b, ctx in zip(*_steps(rng, 10), strict=True):
            measured = (a + c * b + kappa * ctx) * math.exp(rng.normal(0, 0.05))
            interval = fit.interval(1.0, b, ctx)
            inside.append(interval.low <= measured <= interval.high)
    assert np.abs(np.median(errors)) < 0.3
    assert np.quantile(np.abs(errors), 0.95) < 4
    assert 0.70 < np.mean(inside) < 0.95


def test_a_decode_fit_is_a_scenario_s_decode_step() -> None:
    batch, context = _steps(np.random.default_rng(1), 30)
    step = decode_step(fit_decode(batch, context, 5e-3 + 2e-5 * batch + 3e-9 * context))
    assert step.a_s == pytest.approx(5e-3, rel=0.02)
    assert step.c_s == pytest.approx(2e-5, rel=0.05)
    assert step.kappa_s == pytest.approx(3e-9, rel=0.02)


def test_beyond_the_points_an_interval_is_wider_and_says_so() -> None:
    batch, context = _steps(np.random.default_rng(2), 30)
    fit = fit_decode(batch, context, 5e-3 + 2e-5 * batch + 3e-9 * context)
    near, far = fit.interval(1, 100, 1e6), fit.interval(1, 100, 1e9)
    assert far.high / far.low > near.high / near.low
    assert fit.extrapolates(1, 100, 1e9)
    assert not fit.extrapolates(1, 100, 1e6)


@pytest.mark.parametrize("sigma", [0.4, 1.2])
def test_cut_lengths_give_scipy_s_censored_lognormal(sigma: float) -> None:
    drawn = np.random.default_rng(3).lognormal(7, sigma, 3000)
    cap = float(np.quantile(drawn, 0.9))
    cut = drawn >= cap
    fit = fit_lengths(np.minimum(drawn, cap), cut)
    data = stats.CensoredData(uncensored=drawn[~cut], right=np.full(cut.sum(), cap))
    shape, _, scale = stats.lognorm.fit(data, floc=0)
    assert isinstance(fit.law, LognormalLengths)
    assert fit.params["sigma"] == pytest.approx(shape, rel=2e-3)
    assert fit.params["mu"] == pytest.approx(math.log(scale), abs=2e-3)
    assert abs(fit.params["sigma"] - sigma) < 5 * fit.std["sigma"]


@pytest.mark.parametrize("law", ["exponential", "lognormal", "pareto"])
def test_the_law_is_told_apart_and_an_attempt_lies_in_its_interval(law: str) -> None:
    rng = np.random.default_rng(4)
    draw = {
        "exponential": lambda n: rng.exponential(2000, n) + 1e-9,
        "lognormal": lambda n: rng.lognormal(7, 0.8, n),
        "pareto": lambda n: 500 * (1 + rng.pareto(2.5, n)),
    }[law]
    fit = fit_lengths(draw(2000))
    assert fit.law.kind == law
    interval = fit.interval(0.8)
    fresh = draw(4000)
    # 5 sigma of a share of 0.8 of 4,000 draws, and the fit's own error
    assert abs(np.mean((fresh >= interval.low) & (fresh <= interval.high)) - 0.8) < 0.05


def test_lengths_that_cannot_be_fitted_are_refused() -> None:
    with pytest.raises(InputError, match="five lengths"):
        fit_lengths([3.0, 4.0, 5.0])
    with pytest.raises(InputError, match="above zero"):
        fit_lengths([1.0, 2.0, 3.0, 4.0, 5.0, 0.0])


def test_synchronisation_is_a_latency_and_a_bandwidth() -> None:
    nbytes = np.array([1e6, 1e7, 1e8, 1e9, 4e9])
    fit = fit_sync(nbytes, 2e-3 + nbytes / 8e9)
    assert fit.by_name["alpha"] == pytest.approx(2e-3, rel=0.05)
    assert 1 / fit.by_name["per_byte"] == pytest.approx(8e9, rel=0.02)


def test_phases_of_rounds_are_fixed_and_grow_with_tokens() -> None:
    rng = np.random.default_rng(5)
    rounds = [
        RoundSample(
            round=i,
            round_time_s=1.0,
            generated_tokens=tokens,
            time_s={
                "generation": (5 + 2e-5 * tokens) * math.exp(rng.normal(0, 0.02)),
                "weight_sync": 3.0 * math.exp(rng.normal(0, 0.02)),
            },
        )
        for i, tokens in enumerate(np.linspace(2e5, 2e6, 12))
    ]
    fit = fit_rounds(rounds)
    found = fit.predict(1e6)
    assert found["generation"] == pytest.approx(25.0, rel=0.03)
    assert found["weight_sync"] == pytest.approx(3.0, rel=0.03)
    interval = fit.interval(1e6)
    assert interval.low < 28.0 < interval.high
    with pytest.raises(InputError, match="two measured rounds"):
        fit_rounds(rounds[:1])


def test_stages_get_a_factor_where_they_were_measured_twice() -> None:
    measured = [StageMetrics(stage="pretrain", wall_s=w, gpu_s=w) for w in (110.0, 112.0)]
    once = [StageMetrics(stage="sft", wall_s=5.0, gpu_s=5.0)]
    fits = fit_stages([*measured, *once], {"pretrain": 100.0, "sft": 4.0})
    assert set(fits) == {"pretrain"}
    assert fits["pretrain"].by_name["factor"] == pytest.approx(1.11, rel=0.03)
