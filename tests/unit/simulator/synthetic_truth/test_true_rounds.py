"""Hidden laws of rollout rounds, measured with noise and outliers: the fits must find them.

Predictions are compared with the truth itself, not with the noisy numbers the fit saw; the
bounds are in units of the noise. Intervals are checked by how many fresh measurements they
hold, over many truths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flopwright.simulator.calibration.fit_lengths import LengthFit, fit_lengths
from flopwright.simulator.calibration.fit_rounds import (
    decode_step,
    fit_decode,
    fit_rounds,
    fit_sync,
)
from flopwright.simulator.rollouts.rounds import simulate
from flopwright.spec.rollouts.scenario import RolloutScenario

pytestmark = pytest.mark.slow

Array = NDArray[np.float64]
STATED = 0.8


@dataclass(frozen=True)
class Decode:
    """A decode step: a + c * attempts + kappa * context; log noise, and rare late steps."""

    a: float
    c: float
    kappa: float
    noise: float
    late: float

    def seconds(self, batch: Array, context: Array) -> Array:
        return self.a + self.c * batch + self.kappa * context

    def measured(self, rng: np.random.Generator, batch: Array, context: Array) -> Array:
        out = self.seconds(batch, context) * np.exp(rng.normal(0, self.noise, len(batch)))
        odd = rng.random(len(batch)) < self.late
        return np.where(odd, out * rng.uniform(1.5, 6.0, len(batch)), out)


def logs(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


# Weights read and latencies, an attempt's own work, a token of KV read; at a typical load
# (64 attempts of 4,000 tokens) each of them is between 2 and 90 % of the step.
DECODES = st.builds(
    Decode,
    a=logs(2e-3, 3e-2),
    c=logs(5e-6, 2e-4),
    kappa=logs(3e-10, 3e-8),
    noise=logs(0.01, 0.1),
    late=st.floats(0.0, 0.08),
)


def loads(rng: np.random.Generator, count: int) -> tuple[Array, Array]:
    """Returns batches and contexts of an engine in service: both vary, and not together."""
    batch = np.exp(rng.uniform(math.log(1), math.log(256), count)).round()
    return batch, batch * np.exp(rng.uniform(math.log(200), math.log(16_000), count)).round()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(truth=DECODES, seed=st.integers(0, 10**6))
def test_decode_steps_are_predicted_within_the_noise(truth: Decode, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, context = loads(rng, 80)
    fit = fit_decode(batch, context, truth.measured(rng, batch, context))
    new_batch, new_context = loads(rng, 60)
    inside = (new_batch <= batch.max()) & (new_context <= context.max())
    off = np.log(fit.predict(1.0, new_batch, new_context) / truth.seconds(new_batch, new_context))[
        inside
    ]
    # Three terms of eighty points: 0.2 deviations in the mean; late steps pull by as much.
    assert np.median(np.abs(off)) < 0.6 * truth.noise
    assert np.abs(off).max() < 2.0 * truth.noise
    assert fit.residual_log == pytest.approx(truth.noise, rel=0.5)


@pytest.mark.slow
def test_intervals_of_decode_steps_cover_as_stated() -> None:
    shares = []
    for seed in range(80):
        rng = np.random.default_rng(seed)
        truth = Decode(
            a=math.exp(rng.uniform(math.log(2e-3), math.log(3e-2))),
            c=math.exp(rng.uniform(math.log(5e-6), math.log(2e-4))),
            kappa=math.exp(rng.uniform(math.log(3e-10), math.log(3e-8))),
            noise=math.exp(rng.uniform(math.log(0.01), math.log(0.1))),
            late=rng.uniform(0, 0.05),
        )
        batch, context = loads(rng, 20 + seed % 60)
        fit = fit_decode(batch, context, truth.measured(rng, batch, context))
        new_batch, new_context = loads(rng, 40)
        inside = (new_batch <= batch.max()) & (new_context <= context.max())
        clean = truth.seconds(new_batch, new_context) * np.exp(rng.normal(0, truth.noise, 40))
        held = [
            i.low <= s <= i.high
            for i, s in (
                (fit.interval(1.0, b, c, probability=STATED), s)
                for b, c, s in zip(
                    new_batch[inside], new_context[inside], clean[inside], strict=True
                )
            )
        ]
        shares.append(float(np.mean(held)))
    sigma = float(np.std(shares)) / math.sqrt(len(shares))
    assert abs(float(np.mean(shares)) - STATED) < 0.03 + 3 * sigma
    assert np.quantile(shares, 0.1) > 0.6  # and no truth is left out


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    alpha=logs(0.05, 5.0),
    rate=logs(1e9, 1e11),
    noise=logs(0.01, 0.1),
    seed=st.integers(0, 10**6),
)
def test_synchronisations_are_predicted_within_the_noise(
    alpha: float, rate: float, noise: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    nbytes = np.exp(rng.uniform(math.log(1e8), math.log(1e12), 25))
    seconds = (alpha + nbytes / rate) * np.exp(rng.normal(0, noise, 25))
    seconds[rng.integers(25)] *= 4.0  # one that met a busy network
    fit = fit_sync(nbytes, seconds)
    sizes = np.geomspace(nbytes.min(), nbytes.max(), 20)
    off = np.log(fit.predict(1.0, sizes) / (alpha + sizes / rate))
    assert np.abs(off).max() < 2.0 * noise
    assert fit.interval(1.0, 5e13).high / fit.interval(1.0, 5e13).low > (
        fit.interval(1.0, 1e11).high / fit.interval(1.0, 1e11).low
    )
    assert fit.extrapolates(1.0, 5e13)


LAWS = st.one_of(
    st.tuples(st.just("lognormal"), logs(300, 2e4), st.floats(0.3, 1.5)),
    st.tuples(st.just("exponential"), logs(300, 2e4), st.just(1.0)),
    st.tuples(st.just("pareto"), logs(100, 2000), st.floats(1.3, 4.0)),
)


def drawn(law: tuple[str, float, float], rng: np.random.Generator, count: int) -> Array:
    kind, size, shape = law
    if kind == "lognormal":
        values = size * np.exp(rng.normal(0, shape, count))
    elif kind == "exponential":
        values = rng.exponential(size, count)
    else:
        values = size * (1 - rng.random(count)) ** (-1 / shape)
    return np.ceil(np.minimum(values, 1e8))


def truth_of(law: tuple[str, float, float]) -> dict[str, float]:
    kind, size, shape = law
    if kind == "lognormal":
        return {"mu": math.log(size), "sigma": shape}
    return {"mean": size} if kind == "exponential" else {"minimum": size, "alpha": shape}


def right_law(law: tuple[str, float, float], fit: LengthFit) -> bool:
    return fit.law.kind == law[0]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(law=LAWS, cut_share=st.floats(0.0, 0.15), seed=st.integers(0, 10**6))
def test_the_law_of_lengths_is_found_through_the_cap(
    law: tuple[str, float, float], cut_share: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    lengths = drawn(law, rng, 1500)
    cap = int(np.quantile(lengths, 1 - cut_share)) if cut_share > 0.01 else None
    seen = lengths if cap is None else np.minimum(lengths, cap)
    fit = fit_lengths(seen, cap=cap)
    assert right_law(law, fit)
    for name, true in truth_of(law).items():
        # Whole tokens are rounded up: the least by up to one, the mean by a half.
        slack = 1.01 if name in {"mean", "minimum"} else 0.02
        assert abs(fit.params[name] - true) < 5 * fit.std[name] + slack + 1e-3 * abs(true)


@pytest.mark.slow
def test_intervals_of_lengths_cover_as_stated() -> None:
    shares = []
    for seed in range(90):
        rng = np.random.default_rng(seed)
        law = (
            ("lognormal", 2000.0, rng.uniform(0.3, 1.5)),
            ("exponential", 3000.0, 1.0),
            ("pareto", 500.0, rng.uniform(1.3, 4.0)),
        )[seed % 3]
        fit = fit_lengths(drawn(law, rng, 60 + 5 * seed))
        span = fit.interval(STATED)
        fresh = drawn(law, rng, 400)
        shares.append(float(np.mean((fresh >= span.low) & (fresh <= span.high))))
    sigma = float(np.std(shares)) / math.sqrt(len(shares))
    assert abs(float(np.mean(shares)) - STATED) < 0.02 + 3 * sigma


def scenario(**changes: object) -> RolloutScenario:
    """A loop of 192 attempts on four instances."""
    values: dict[str, object] = {
        "name": "hidden",
        "prompts": 24,
        "samples_per_prompt": 8,
        "prompt_tokens": 256,
        "lengths": {"kind": "lognormal", "mean": 1500, "sigma": 0.7, "cap": 8192},
        "lambda": 0.9,
        "instances": 4,
        "decode": {"per_step": "8 ms", "per_attempt": "40 us", "per_context_token": "12 ns"},
        "switch": {"to_update": "3 s", "to_generation": "4 s"},
        "update": {"fixed": "5 s", "per_token": "60 us"},
        "weight_sync": {"fixed": "1 s", "size": "60 GB", "bandwidth": "10 GB/s"},
        **changes,
    }
    return RolloutScenario.model_validate(values)


def mean_round_s(of: RolloutScenario, seed: int, rounds: int = 12) -> float:
    return simulate(of, rounds=rounds, seed=seed).steady.round_time_s


@pytest.mark.parametrize("seed", range(4))
def test_rounds_of_a_fitted_scenario_take_as_long_as_the_hidden_ones(seed: int) -> None:
    """The whole way: logs of decode steps, lengths and syncs become a scenario again."""
    rng = np.random.default_rng(seed)
    noise = 0.04
    truth = Decode(
        a=rng.uniform(4e-3, 1.5e-2),
        c=rng.uniform(1e-5, 8e-5),
        kappa=rng.uniform(4e-9, 2e-8),
        noise=noise,
        late=0.03,
    )
    sigma, mean = rng.uniform(0.4, 0.9), rng.uniform(800, 2500)
    hidden = scenario(
        lengths={"kind": "lognormal", "mean": round(mean), "sigma": sigma, "cap": 8192},
        decode={
            "per_step": f"{truth.a} s",
            "per_attempt": f"{truth.c} s",
            "per_context_token": f"{truth.kappa} s",
        },
    )
    batch, context = loads(rng, 120)
    decode = fit_decode(batch, context, truth.measured(rng, batch, context))
    location = math.log(round(mean)) - sigma**2 / 2
    seen = np.minimum(np.ceil(np.exp(rng.normal(location, sigma, 3000))), 8192)
    lengths = fit_lengths(seen, cap=8192)
    nbytes = np.geomspace(1e9, 1e11, 12)
    sync = fit_sync(nbytes, (1.0 + nbytes / 1e10) * np.exp(rng.normal(0, noise, 12)))
    fitted = hidden.model_copy(
        update={
            "lengths": lengths.law,
            "decode": decode_step(decode),
            "weight_sync": hidden.weight_sync.model_copy(
                update={
                    "fixed_s": sync.by_name["alpha"],
                    "bytes_per_s": 1 / sync.by_name["per_byte"],
                }
            ),
        }
    )
    ratios = [mean_round_s(fitted, s) / mean_round_s(hidden, s) for s in range(4)]
    assert abs(math.log(float(np.median(ratios)))) < noise


@pytest.mark.slow
@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    fixed=st.floats(1.0, 20.0),
    per_token=logs(1e-6, 1e-4),
    noise=logs(0.01, 0.06),
    seed=st.integers(0, 10**6),
)
def test_phases_of_measured_rounds_are_predicted_within_the_noise(
    fixed: float, per_token: float, noise: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    base = simulate(scenario(), rounds=3, seed=0).steady
    measured, tokens = [], rng.uniform(1e5, 1e6, 16).round()
    for t in tokens:
        time_s = {
            "update": (fixed + per_token * t) * math.exp(rng.normal(0, noise)),
            "weight_sync": 3.0 * math.exp(rng.normal(0, noise)),
        }
        measured.append(
            base.model_copy(
                update={
                    "time_s": time_s,
                    "round_time_s": sum(time_s.values()),
                    "generated_tokens": int(t),
                }
            )
        )
    fit = fit_rounds(measured)
    for t in np.linspace(tokens.min(), tokens.max(), 7):
        found = fit.predict(float(t))
        assert abs(math.log(found["update"] / (fixed + per_token * t))) < 2.5 * noise
        assert abs(math.log(found["weight_sync"] / 3.0)) < 1.5 * noise
