"""Gains of partial rounds, ends of capped phases, and who pays for what: theory in numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flopwright.simulator.rollouts import closed_forms as cf
from flopwright.simulator.rollouts import theory
from flopwright.simulator.rollouts.layouts_identity import best_rollout_share, split_rate
from flopwright.simulator.rollouts.lengths import LengthStream, clip_share, survival
from flopwright.simulator.rollouts.rounds import simulate_rounds
from flopwright.spec.rollout import (
    DecodeStep,
    ExponentialLengths,
    LognormalLengths,
    ParetoLengths,
    RolloutScenario,
)

EXPONENTIAL = ExponentialLengths(mean=5000)
LOGNORMAL = LognormalLengths(mean=5000, sigma=1.0)


@pytest.mark.parametrize(
    ("fraction", "exponential", "lognormal"),
    [(0.5, 6.4, 17.7), (0.7, 5.2, 14.2), (0.8, 4.4, 11.9), (0.9, 3.5, 8.8), (0.95, 2.8, 6.6),
     (0.99, 1.9, 3.6)],
)  # fmt: skip
def test_gain_of_4096_attempts_where_latency_binds(fraction, exponential, lognormal):
    for law, want in ((EXPONENTIAL, exponential), (LOGNORMAL, lognormal)):
        longest, tau = cf.expected_maximum(law, 4096), cf.tau_fluid(law, fraction)
        got = theory.gain(fraction, longest, tau)
        assert got == pytest.approx(want, abs=0.051)
        assert (1 - fraction) * longest / 5000 <= got <= longest / 5000


def test_amdahl_for_the_whole_iteration():
    assert theory.gain_of_whole(1.0, 4.0) == 4
    assert theory.gain_of_whole(0.8, 4.0) == pytest.approx(2.5)
    assert theory.gain_of_whole(0.0, 4.0) == 1


@pytest.mark.parametrize(
    ("attempts", "needed", "a", "c"), [(128, 128, 10, 0.1), (128, 115, 10, 0.1), (64, 50, 1, 0.5)]
)
def test_exponential_phases_with_a_linear_step(attempts, needed, a, c):
    """A pure-death chain: E[T] = mu (a (H_M - H_{M-m}) + c m)."""
    mean = 5000
    s = RolloutScenario(
        name="chain", prompts=attempts, lengths=ExponentialLengths(mean=mean), ties="strict",
        stop_fraction=needed / attempts,
        decode=DecodeStep(per_step=f"{a} s", per_attempt=f"{c} s"),
    )  # fmt: skip
    records = simulate_rounds(s, 180, 4)[20:]
    ends = np.array([r.phase.end_s for r in records])
    want = theory.exponential_phase_s(mean, attempts, needed, a, c)
    sigma = ends.std(ddof=1) / math.sqrt(len(ends))
    assert abs(ends.mean() - want) <= 5 * sigma
    gain = needed / attempts * theory.exponential_phase_s(mean, attempts, attempts, 0, c)
    assert gain == pytest.approx(theory.exponential_phase_s(mean, attempts, needed, 0, c))


def test_small_fractions_have_their_own_tau():
    for law in (EXPONENTIAL, LOGNORMAL):
        tau = cf.tau_fluid(law, 0.02)
        assert tau == pytest.approx(theory.tau_small_fraction(5000, 0.02), rel=2e-3)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    st.floats(0.05, 0.97),
    st.sampled_from([EXPONENTIAL, LOGNORMAL, ParetoLengths(minimum=900, alpha=1.7)]),
)
def test_tau_solves_its_equation_within_its_bounds(fraction, law):
    tau = cf.tau_fluid(law, fraction)
    low, high = cf.tau_bounds(cf.mean_length(law), fraction)
    assert low * (1 - 1e-9) <= tau <= high * (1 + 1e-9)
    assert theory.tau_of(survival(law), fraction, cf.mean_length(law)) == pytest.approx(
        tau, rel=0.02
    )


def test_a_clipped_batch_ends_at_its_cap_and_the_cap_sets_the_price():
    """P(longest = C) = 1 - (1 - S(C))^M: with 1 % clipped and 512 attempts, 0.994."""
    law = LognormalLengths(mean=5000, sigma=1.0, cap=31_000)
    share = clip_share(law)
    assert share == pytest.approx(0.0104, abs=0.001)
    hits = 1 - (1 - share) ** 512
    assert hits > 0.99
    seeds = [LengthStream(law, seed).draw(512).max() == 31_000 for seed in range(300)]
    assert abs(np.mean(seeds) - hits) <= 5 * math.sqrt(hits * (1 - hits) / 300) + 1 / 300
    assert cf.expected_maximum(law, 512) == pytest.approx(31_000, rel=0.01)


def test_a_group_of_one_and_groups_that_are_alike_are_attempts():
    plain = survival(LOGNORMAL)
    x = np.linspace(0, 60_000, 50)
    np.testing.assert_allclose(theory.group_survival(plain, 1)(x), plain(x), rtol=1e-12)
    np.testing.assert_array_equal(theory.group_survival(plain, 8, 1.0)(x), plain(x))
    brute = 1 - (1 - plain(x)) ** 8
    np.testing.assert_allclose(theory.group_survival(plain, 8)(x), brute, rtol=1e-9, atol=1e-12)


def test_reuse_beats_recomputing_above_the_bandwidth_of_the_prefill():
    even = theory.reuse_bandwidth(70_272, 5e-5, 2e-10, 8192)
    seconds = 5e-5 * 8192 + 2e-10 * 8192**2 / 2
    assert 70_272 * 8192 / even == pytest.approx(seconds)
    assert theory.reuse_bandwidth(70_272, 5e-5, 2e-10, 100_000) < even  # longer pays sooner


def test_the_best_split_has_the_rate_of_the_co_located_loop():
    rate, train = 3000.0, 9000.0
    share = best_rollout_share(rate, train)
    assert share == pytest.approx(train / (rate + train))
    together = 64 * rate * train / (rate + train)
    assert split_rate(64, share, rate, train) == pytest.approx(together)
    for other in (share - 0.1, share + 0.1):
        assert split_rate(64, other, rate, train) < together
