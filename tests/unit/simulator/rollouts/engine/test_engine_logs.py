"""Logs read and laws fitted to them."""

from __future__ import annotations

import numpy as np
import pytest

from flopwright.errors import InputError
from flopwright.report.records import EngineLine
from flopwright.simulator.rollouts.engine.fit import fit_steps
from flopwright.simulator.rollouts.engine.logs import EngineSample, samples_of

TRUTH = (8e-3, 3e-5, 4e-8)


def samples(count: int, noise: float, seed: int = 0) -> list[EngineSample]:
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        running = int(rng.integers(1, 200))
        context = float(running * rng.integers(500, 20_000))
        step = TRUTH[0] + TRUTH[1] * running + TRUTH[2] * context
        found.append(EngineSample(running, context, running / (step * rng.lognormal(0, noise))))
    return found


def test_decoding_lines_are_samples_and_others_are_not() -> None:
    vllm = EngineLine(
        phase="mixed", running=16, waiting=3, generated_tokens_per_s=812.0,
        prompt_tokens_per_s=12.5, kv_usage=0.25,
    )  # fmt: skip
    sglang = EngineLine(
        phase="decode", running=32, waiting=0, generated_tokens_per_s=1600.0, context_tokens=65_536
    )
    others = [
        vllm.model_copy(update={"generated_tokens_per_s": 0.0}),
        vllm.model_copy(update={"running": 0}),
        EngineLine(phase="prefill", running=4, waiting=0, new_tokens=512),
    ]
    found = samples_of([vllm, *others, sglang], capacity_tokens=400_000)
    assert found == [
        EngineSample(16, 100_000.0, 812.0, 12.5),
        EngineSample(32, 65_536, 1600.0),
    ]
    assert found[1].step_s == pytest.approx(0.02)


def test_a_law_without_noise_is_found_exactly() -> None:
    found = fit_steps(samples(40, 0.0))
    assert found.coefficients == pytest.approx(TRUTH, rel=1e-6)
    assert found.table().seconds(50, 100_000) == pytest.approx(found.seconds(50, 100_000))


def test_with_noise_the_truth_is_inside_the_uncertainty() -> None:
    found = fit_steps(samples(400, 0.05, seed=1))
    deviations = np.sqrt(np.diag(found.covariance))
    assert np.all(np.abs(found.coefficients - TRUTH) < 5 * deviations)
    assert found.residual_log == pytest.approx(0.05, rel=0.2)


def test_eighty_per_cent_of_new_samples_fall_inside_the_interval() -> None:
    found = fit_steps(samples(60, 0.06, seed=2))
    fresh = samples(2000, 0.06, seed=3)
    inside = 0
    for sample in fresh:
        low, high = found.interval(sample.running, sample.context_tokens)
        inside += low <= sample.step_s <= high
    # Five standard errors of 2,000 draws, and the spread of a deviation known from 60 samples.
    assert inside / len(fresh) == pytest.approx(0.8, abs=0.12)


def test_what_a_log_cannot_tell_stays_as_predicted() -> None:
    same = [EngineSample(16, 160_000.0, 16 / 0.02)] * 5
    found = fit_steps(same, prior=TRUTH)
    assert found.seconds(16, 160_000) == pytest.approx(0.02, rel=0.02)
    ratios = found.coefficients / TRUTH
    assert np.all((ratios > 0.4) & (ratios < 2.5))


def test_too_few_samples_without_a_prediction_are_an_error() -> None:
    with pytest.raises(InputError, match="three samples"):
        fit_steps(samples(2, 0.0))
