"""Closed forms against scipy, quadrature and Monte-Carlo with fixed seeds."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from flopwright.simulator.rollouts import closed_forms as cf
from flopwright.simulator.rollouts.lengths import LengthStream, survival
from flopwright.spec.rollout import (
    DeterministicLengths,
    EmpiricalLengths,
    ExponentialLengths,
    LognormalLengths,
    ParetoLengths,
)

LAWS = [
    ExponentialLengths(mean=1000),
    ExponentialLengths(mean=1000, cap=1500),
    LognormalLengths(mean=5000, sigma=1.0),
    LognormalLengths(mean=5000, sigma=1.0, cap=32768),
    ParetoLengths(minimum=1000, alpha=2.5),
    ParetoLengths(minimum=1000, alpha=1.5, cap=50_000),
    DeterministicLengths(tokens=700),
    DeterministicLengths(tokens=700, cap=300),
    EmpiricalLengths(values=(50, 20, 400), weights=(1, 2, 0.5)),
    EmpiricalLengths(values=(50, 20, 400), cap=100),
]


def name(law) -> str:
    return f"{law.kind}-{law.cap}"


def distribution(law):
    """scipy's own form of the law, before the cap."""
    match law:
        case ExponentialLengths():
            return stats.expon(scale=law.mean)
        case LognormalLengths():
            return stats.lognorm(s=law.sigma, scale=law.mean * math.exp(-(law.sigma**2) / 2))
        case ParetoLengths():
            return stats.pareto(b=law.alpha, scale=law.minimum)
    raise AssertionError(law)


@pytest.mark.parametrize("n", [1, 2, 10, 100, 101, 5000])
def test_harmonic(n):
    assert cf.harmonic(n) == pytest.approx(special.digamma(n + 1) + np.euler_gamma, rel=1e-13)


@pytest.mark.parametrize("s", [1.01, 1.5, 2.0, 3.7, 12.0])
def test_zeta(s):
    assert cf.zeta(s) == pytest.approx(special.zeta(s), rel=1e-12)


@pytest.mark.parametrize("law", LAWS[:6], ids=name)
def test_survival_is_scipys(law):
    x = np.linspace(0, 1.2 * (law.cap or 40_000), 301)
    want = np.where(x >= (law.cap or math.inf), 0.0, distribution(law).sf(x))
    np.testing.assert_allclose(survival(law)(x), want, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("law", LAWS, ids=name)
def test_draws_follow_the_survival_function(law):
    count = 200_000
    drawn = LengthStream(law, 7).draw(count)
    assert drawn.min() >= 1
    for x in np.quantile(drawn, [0.05, 0.3, 0.5, 0.8, 0.95, 0.999]).astype(int):
        p = float(survival(law)(np.array([float(x)]))[0])
        sigma = math.sqrt(p * (1 - p) / count)
        assert abs((drawn > x).mean() - p) <= 5 * sigma + 1e-12


@pytest.mark.parametrize("law", LAWS, ids=name)
def test_how_many_are_drawn_at_a_time_changes_nothing(law):
    whole = LengthStream(law, 3).draw(100)
    stream = LengthStream(law, 3)
    parts = np.concatenate([stream.draw(n) for n in (1, 0, 42, 57)])
    assert whole.tolist() == parts.tolist()
    assert law.kind == "deterministic" or whole.tolist() != LengthStream(law, 4).draw(100).tolist()


@pytest.mark.parametrize("law", LAWS, ids=name)
def test_moments(law):
    if isinstance(law, (DeterministicLengths, EmpiricalLengths)):
        values = np.array(getattr(law, "values", None) or [law.tokens], dtype=float)
        weights = np.array(getattr(law, "weights", ()) or np.ones(len(values)))
        values = np.minimum(values, law.cap or math.inf)
        first, second = (np.average(values**k, weights=weights) for k in (1, 2))
    elif law.cap is None:
        first, second = distribution(law).moment(1), distribution(law).moment(2)
    else:
        sf = distribution(law).sf
        parts = [(0.0, 1000.0), (1000.0, float(law.cap))]
        first = sum(integrate.quad(sf, a, b, limit=400)[0] for a, b in parts)
        second = sum(integrate.quad(lambda x: 2 * x * sf(x), a, b)[0] for a, b in parts)
    assert cf.mean_length(law) == pytest.approx(first, rel=1e-7)
    assert cf.mean_square(law) == pytest.approx(second, rel=1e-7)


def test_infinite_moments_are_said():
    assert math.isinf(cf.mean_square(ParetoLengths(minimum=10, alpha=2.0)))


@pytest.mark.parametrize("law", LAWS, ids=name)
@pytest.mark.parametrize("attempts", [1, 512])
def test_expected_maximum_against_draws(law, attempts):
    repeats = 4000 if attempts > 1 else 400_000
    most = LengthStream(law, 11).draw(attempts * repeats).reshape(repeats, attempts).max(1)
    sigma = most.std() / math.sqrt(repeats)
    assert abs(most.mean() - cf.expected_maximum(law, attempts)) <= 5 * sigma + 1.0


def test_order_statistic_of_pareto_by_the_beta_law():
    minimum, alpha, attempts, rank = 1000, 1.5, 50, 45
    u = stats.beta(rank, attempts - rank + 1)
    want = integrate.quad(lambda x: u.pdf(x) * minimum * (1 - x) ** (-1 / alpha), 0, 1)[0]
    got = cf.pareto_order_statistic(minimum, alpha, attempts, rank)
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("law", [*LAWS[:6], LAWS[8]], ids=name)
def test_tau_solves_its_equation_within_its_bounds(law, fraction):
    tau = cf.tau_fluid(law, fraction)
    low, high = cf.tau_bounds(cf.mean_length(law), fraction)
    assert low <= tau <= high
    if law.kind == "empirical" or law.cap:  # with atoms the sum may jump over 1/lambda at tau
        value = [survival(law)(np.arange(4000) * t).sum() for t in (tau * 0.9999, tau * 1.0001)]
        assert value[1] <= 1 / fraction <= value[0]
    else:
        total = survival(law)(np.arange(3_000_000) * tau).sum()
        assert total == pytest.approx(1 / fraction, rel=2e-4)


@pytest.mark.parametrize("fraction", [0.3, 0.9])
def test_tau_of_exponential_and_pareto_in_closed_form(fraction):
    exponential = ExponentialLengths(mean=1000)
    want = -1000 * math.log(1 - fraction)
    assert cf.tau_exponential(1000, fraction) == pytest.approx(want, rel=1e-12)
    assert cf.tau_fluid(exponential, fraction) == pytest.approx(want, rel=1e-9)
    pareto = ParetoLengths(minimum=1000, alpha=2.5)
    closed = 1000 * (special.zeta(2.5) * fraction / (1 - fraction)) ** (1 / 2.5)
    assert cf.tau_pareto(1000, 2.5, fraction) == pytest.approx(closed, rel=1e-12)
    if closed >= 1000:
        assert cf.tau_fluid(pareto, fraction) == pytest.approx(closed, rel=1e-6)


def test_staleness_of_pareto_is_zipf():
    law, fraction = ParetoLengths(minimum=1000, alpha=1.5), 0.9
    tau = cf.tau_pareto(1000, 1.5, fraction)
    for j in (1, 2, 5):
        zipf = (1 - fraction) / (fraction * special.zeta(1.5)) * j**-1.5
        assert cf.staleness_survival(law, tau, j) == pytest.approx(zipf, rel=1e-9)


def test_tau_at_finite_m_tends_to_the_fluid_one():
    assert cf.tau_exponential_finite(1.0, 10**6, 9 * 10**5) == pytest.approx(
        cf.tau_exponential(1.0, 0.9), rel=1e-5
    )


@pytest.mark.parametrize(("u", "published"), [(0.1, 0.3405), (0.6, 0.6043), (2.0, 0.7780)])
def test_optimal_lambda_maximises_throughput(u, published):
    best = optimize.minimize_scalar(
        lambda x: -x / (-math.log(1 - x) + u), bounds=(1e-3, 0.9999), method="bounded"
    ).x
    got = cf.optimal_stop_fraction_exponential(u, 1.0)
    assert got == pytest.approx(best, abs=1e-4)
    assert got == pytest.approx(published, abs=5.1e-5)


def test_off_policy_share_is_at_least_one_less_lambda():
    for law in LAWS[:6]:
        for fraction in (0.3, 0.9):
            tau = cf.tau_fluid(law, fraction)
            assert cf.off_policy_share(tau, cf.mean_length(law), fraction) >= 1 - fraction - 1e-9
    share = cf.off_policy_share(cf.tau_exponential(1.0, 0.9), 1.0, 0.9)
    assert share == pytest.approx(0.2558, abs=1e-4)


def test_slots_fifo_exponential_against_a_heap():
    rng = np.random.default_rng(5)
    attempts, needed, slots, ends = 60, 50, 8, []
    for _ in range(4000):
        heap, end = [0.0] * slots, []
        for x in rng.exponential(1.0, attempts):
            t = heapq.heappop(heap) + x
            heapq.heappush(heap, t)
            end.append(t)
        ends.append(np.sort(end)[needed - 1])
    sigma = np.std(ends) / math.sqrt(len(ends))
    want = cf.slots_fifo_exponential(1.0, attempts, needed, slots)
    assert abs(np.mean(ends) - want) <= 5 * sigma
