"""Simulated steady states against theory: 5 sigma with fixed seeds, or exactly."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy import stats

from flopwright.errors import InputError
from flopwright.simulator.rollouts import closed_forms as cf
from flopwright.simulator.rollouts.lengths import LengthStream
from flopwright.simulator.rollouts.record import RoundRecord
from flopwright.simulator.rollouts.report import warmup_rounds
from flopwright.simulator.rollouts.rounds import simulate, simulate_rounds
from flopwright.simulator.rollouts.sweep import choose, default_fractions, sweep_lambda
from flopwright.spec.rollout import (
    DecodeStep,
    DeterministicLengths,
    ExponentialLengths,
    LengthSpec,
    LognormalLengths,
    ParetoLengths,
    RolloutScenario,
    Update,
    WeightSync,
)

pytestmark = pytest.mark.slow

MEAN = 1_000_000  # long attempts: rounding to whole tokens does not show
EXPONENTIAL = ExponentialLengths(mean=MEAN)
LATENCY_ONLY = DecodeStep(per_step="1 s")  # seconds are tokens


def scenario(lengths: LengthSpec, attempts: int, fraction: float, **changes) -> RolloutScenario:
    data = {"decode": LATENCY_ONLY, "ties": "strict", **changes}
    return RolloutScenario(
        name="theory", prompts=attempts, lengths=lengths, stop_fraction=fraction, **data
    )


@cache
def steady(lengths: LengthSpec, attempts: int, fraction: float, rounds: int) -> list[RoundRecord]:
    warm = 4 * warmup_rounds(fraction)
    return simulate_rounds(scenario(lengths, attempts, fraction), warm + rounds, 17)[warm:]


def mean_and_sigma(values: np.ndarray, batches: int = 20) -> tuple[float, float]:
    """Mean and its standard error; batches of rounds, since neighbours are correlated."""
    means = np.array([b.mean() for b in np.array_split(np.asarray(values, float), batches)])
    return float(np.mean(values)), float(means.std(ddof=1) / math.sqrt(batches))


def generation_s(records: list[RoundRecord]) -> np.ndarray:
    return np.array([r.metrics.time_s["generation"] for r in records])


CASES = [(64, 0.5, 600), (64, 0.9, 600), (256, 0.75, 150)]


@pytest.mark.parametrize(("attempts", "fraction", "rounds"), CASES)
def test_phase_of_exponential_lengths(attempts, fraction, rounds):
    """E tau = mu (H_M - H_{M-m}) at finite M, exactly."""
    needed = math.ceil(fraction * attempts)
    got, sigma = mean_and_sigma(generation_s(steady(EXPONENTIAL, attempts, fraction, rounds)))
    want = cf.tau_exponential_finite(MEAN, attempts, needed)
    assert sigma < 0.02 * want
    assert abs(got - want) <= 5 * sigma


@pytest.mark.parametrize(("attempts", "fraction", "rounds"), CASES)
def test_littles_law_and_parked_attempts(attempts, fraction, rounds):
    """Exactly m leave and M - m are parked; so E[J] = M/m, and the completed ones show it."""
    records = steady(EXPONENTIAL, attempts, fraction, rounds)
    needed = math.ceil(fraction * attempts)
    assert {r.metrics.completed for r in records} == {needed}
    spans = np.array([r.rounds_in_flight.mean() for r in records])
    got, sigma = mean_and_sigma(spans)
    assert cf.mean_rounds(attempts, needed) == attempts / needed
    assert sigma < 0.02
    assert abs(got - attempts / needed) <= 5 * sigma
    # whatever is still in flight accounts for the rest, to the last round
    s = scenario(EXPONENTIAL, attempts, fraction)
    first = simulate_rounds(s, 50, 17)
    left = 50 * attempts - sum(int(r.rounds_in_flight.sum()) for r in first)
    assert 0 <= left <= (attempts - needed) * 50


@pytest.mark.parametrize(
    "lengths",
    [
        EXPONENTIAL,
        LognormalLengths(mean=MEAN, sigma=1.0),
        ParetoLengths(minimum=MEAN, alpha=2.5),
        LognormalLengths(mean=MEAN, sigma=1.0, cap=4 * MEAN),
    ],
    ids=lambda x: f"{x.kind}-{x.cap}",
)
def test_mean_rounds_is_the_inverse_of_lambda_for_any_law(lengths):
    records = steady(lengths, 128, 0.75, 400)
    got, sigma = mean_and_sigma(np.array([r.rounds_in_flight.mean() for r in records]))
    assert abs(got - 1 / 0.75) <= 5 * sigma
    # no length bias in steady state: completed attempts have the mean of the law
    got, sigma = mean_and_sigma(np.array([r.lengths.mean() for r in records]))
    assert abs(got - cf.mean_length(lengths)) <= 5 * sigma


@pytest.mark.parametrize(("attempts", "fraction", "rounds"), CASES)
def test_staleness_law_of_exponential_lengths(attempts, fraction, rounds):
    """P(J > j) = (1 - m/M)^j: every attempt in flight is as likely as any to be among the m."""
    lags = np.concatenate([r.lags for r in steady(EXPONENTIAL, attempts, fraction, rounds)])
    p = 1 - math.ceil(fraction * attempts) / attempts
    for j in range(1, 5):
        got, sigma = mean_and_sigma(lags + 1 > j)
        # batches see the noise where it is frequent, the binomial law where it is rare
        sigma = max(sigma, math.sqrt(p**j * (1 - p**j) / len(lags)))
        assert abs(got - p**j) <= 5 * sigma


@pytest.mark.parametrize("fraction", [0.75, 0.9])
def test_phase_and_staleness_of_pareto_lengths(fraction):
    """tau = x (zeta(alpha) lambda/(1-lambda))^(1/alpha), Zipf staleness; fluid, so M is large."""
    alpha, x = 2.5, MEAN
    records = steady(ParetoLengths(minimum=x, alpha=alpha), 1000, fraction, 60)
    tau = cf.tau_pareto(x, alpha, fraction)
    got, sigma = mean_and_sigma(generation_s(records))
    assert sigma < 0.01 * tau
    assert abs(got - tau) <= 5 * sigma + 2 * tau / 1000  # finite M differs in the order 1/M
    lags = np.concatenate([r.lags for r in records])
    for j in (1, 2):
        zipf = (1 - fraction) / (fraction * cf.zeta(alpha)) * j**-alpha
        share, sigma = mean_and_sigma(lags + 1 > j)
        assert abs(share - zipf) <= 5 * sigma + 1 / 1000


@pytest.mark.parametrize("fraction", [0.75, 0.9])
def test_phase_of_lognormal_lengths(fraction):
    law = LognormalLengths(mean=MEAN, sigma=1.0)
    tau = cf.tau_fluid(law, fraction)
    got, sigma = mean_and_sigma(generation_s(steady(law, 1000, fraction, 60)))
    assert abs(got - tau) <= 5 * sigma + 2 * tau / 1000
    # not the quantile of the law, which is what the first round shows
    scipy_law = stats.lognorm(s=1.0, scale=MEAN * math.exp(-0.5))
    assert got > 1.05 * scipy_law.ppf(fraction)
    first = simulate_rounds(scenario(law, 1000, fraction), 1, 17)[0]
    assert first.metrics.time_s["generation"] == pytest.approx(scipy_law.ppf(fraction), rel=0.1)


@pytest.mark.parametrize(("attempts", "fraction", "rounds"), CASES)
def test_off_policy_tokens_and_parked_tokens(attempts, fraction, rounds):
    records = steady(EXPONENTIAL, attempts, fraction, rounds)
    needed = math.ceil(fraction * attempts)
    tau = cf.tau_exponential_finite(MEAN, attempts, needed)
    # a parked token is one that an older version generated, when it completes
    off = np.array([r.off_policy_tokens for r in records], dtype=float)
    got, sigma = mean_and_sigma(off / (needed * MEAN))
    assert abs(got - cf.off_policy_share(tau, MEAN, needed / attempts)) <= 5 * sigma
    # parked: sum over k >= 1 of k tau m (1-lambda)^k = M tau (1-lambda) / lambda
    parked = np.array([r.metrics.parked_tokens for r in records], dtype=float)
    got, sigma = mean_and_sigma(parked)
    lam = needed / attempts
    fluid = attempts * tau * (1 - lam) / lam
    assert abs(got - fluid) <= 5 * sigma + 2 * fluid / attempts


@pytest.mark.parametrize("instances", [1, 4])
def test_linear_step_in_steady_state(instances):
    """T = a tau + (m / instances) (c mu + kappa (p mu + E[L (L-1)] / 2)).

    One instance and memoryless lengths: exact with the tau of finite M. More instances run
    at slightly different speeds, which the fluid form does not see.
    """
    mean, attempts, fraction = 10_000, 64, 0.75
    s = scenario(
        ExponentialLengths(mean=mean),
        attempts,
        fraction,
        prompt_tokens=500,
        instances=instances,
        decode=DecodeStep(per_step="20 ms", per_attempt="1 ms", per_context_token="50 ns"),
    )
    records = simulate_rounds(s, 20 + 600, 5)[20:]
    got, sigma = mean_and_sigma(generation_s(records))
    needed = 48
    each = 1e-3 * mean + 50e-9 * (500 * mean + mean**2)
    tau = cf.tau_exponential_finite(mean, attempts, needed)
    want = 20e-3 * tau + needed / instances * each
    assert abs(got - want) <= 5 * sigma + (0 if instances == 1 else 0.02 * want)
    fluid = cf.steady_generation_s(s)
    assert fluid == pytest.approx(want, rel=0.03)


@pytest.mark.slow
def test_first_phase_and_expected_maximum():
    """lambda = 1 from fresh attempts: the phase is the longest of M."""
    s = scenario(EXPONENTIAL, 50, 1.0)
    got, sigma = mean_and_sigma(generation_s(simulate_rounds(s, 500, 3)))
    assert abs(got - cf.expected_maximum(EXPONENTIAL, 50)) <= 5 * sigma
    capped = ExponentialLengths(mean=MEAN, cap=3 * MEAN)
    got, sigma = mean_and_sigma(generation_s(simulate_rounds(scenario(capped, 50, 1.0), 300, 3)))
    assert abs(got - cf.expected_maximum(capped, 50)) <= 5 * sigma


# ---- limits ------------------------------------------------------------------------------


def test_lambda_one_is_synchronous():
    report = simulate(scenario(LognormalLengths(mean=500, sigma=1.0), 64, 1.0), rounds=5)
    assert report.mean_staleness == 0
    assert report.off_policy_share == 0
    assert report.steady.parked_tokens == 0
    assert set(report.steady.staleness) == {0}
    assert set(report.trained_staleness) == {0}
    assert all(m.completed == 64 for m in report.rounds)


def test_only_a_cost_by_token_makes_lambda_inert_by_token():
    s = {"decode": DecodeStep(per_attempt="1 ms")}
    for fraction in (0.3, 0.9, 1.0):
        for r in simulate_rounds(scenario(EXPONENTIAL, 64, fraction, **s), 5, 1):
            tokens = r.metrics.generated_tokens
            assert r.metrics.time_s["generation"] == pytest.approx(1e-3 * tokens, rel=1e-9)


def test_only_a_cost_by_step_makes_the_phase_an_order_statistic():
    lengths = LengthStream(EXPONENTIAL, 1).draw(64)
    for fraction, needed in ((0.3, 20), (0.9, 58), (1.0, 64)):
        r = simulate_rounds(scenario(EXPONENTIAL, 64, fraction), 1, 1)[0]
        assert r.metrics.time_s["generation"] == np.sort(lengths)[needed - 1]


@pytest.mark.parametrize("fraction", [0.3, 0.5, 0.9])
def test_equal_lengths_show_the_tie_policy(fraction):
    law = DeterministicLengths(tokens=100)
    loose = simulate_rounds(scenario(law, 40, fraction, ties="all"), 12, 0)
    assert all(r.metrics.completed == 40 for r in loose)  # lambda is inert
    assert all(r.metrics.time_s["generation"] == 100 for r in loose)
    strict = simulate_rounds(scenario(law, 40, fraction), 120, 0)
    needed = math.ceil(fraction * 40)
    assert all(r.metrics.completed == needed for r in strict)
    spans = np.concatenate([r.rounds_in_flight for r in strict[12:]])
    assert spans.mean() == pytest.approx(40 / needed, rel=0.01)  # E[J] = M/m still holds


def test_infinitely_fast_decoding_leaves_the_fixed_times():
    s = scenario(
        EXPONENTIAL,
        64,
        0.9,
        decode=DecodeStep(per_step="1e-12 ns"),
        update=Update(fixed="7 s"),
        weight_sync=WeightSync(fixed="3 s"),
    )
    assert simulate(s, rounds=3).steady.round_time_s == pytest.approx(10.0, abs=1e-9)


def test_phase_does_not_fall_in_m_nor_in_any_cost():
    def first(fraction: float, a: float, c: float, kappa: float) -> float:
        decode = DecodeStep(
            per_step=f"{a} s", per_attempt=f"{c} s", per_context_token=f"{kappa} s"
        )
        s = scenario(LognormalLengths(mean=500, sigma=1), 60, fraction, decode=decode)
        return simulate_rounds(s, 1, 2)[0].metrics.time_s["generation"]

    for values in (
        [first(x / 20, 1, 0.1, 0.001) for x in range(1, 21)],
        [first(0.9, x, 0.1, 0.001) for x in (0, 0.5, 1, 2)],
        [first(0.9, 1, x, 0.001) for x in (0, 0.5, 1, 2)],
        [first(0.9, 1, 0.1, x) for x in (0, 0.01, 0.1)],
    ):
        assert values == sorted(values)


# ---- slots -------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [1, 3, 16, 64])
def test_slots_keep_grahams_bounds(seed, slots):
    law = LognormalLengths(mean=1000, sigma=1.5)
    s = scenario(law, 64, 1.0, slots_per_instance=slots)
    lengths = LengthStream(law, seed).draw(64)
    got = simulate_rounds(s, 1, seed)[0].metrics.time_s["generation"]
    low, high = cf.graham_bounds(lengths, slots)
    assert max(lengths.max(), lengths.sum() / slots) == low
    assert low <= got <= high


@pytest.mark.parametrize("fraction", [0.8, 1.0])
def test_slots_and_exponential_lengths(fraction):
    """E[T] = mu sum of 1 / min(c, M - i + 1); memoryless, so in steady state too."""
    s = scenario(EXPONENTIAL, 60, fraction, slots_per_instance=8)
    got, sigma = mean_and_sigma(generation_s(simulate_rounds(s, 1030, 3)[30:]))
    want = cf.slots_fifo_exponential(MEAN, 60, math.ceil(fraction * 60), 8)
    assert abs(got - want) <= 5 * sigma


def test_as_many_slots_as_attempts_are_unlimited_slots():
    a = simulate_rounds(scenario(EXPONENTIAL, 60, 0.8), 8, 1)
    b = simulate_rounds(scenario(EXPONENTIAL, 60, 0.8, slots_per_instance=60), 8, 1)
    assert [r.metrics for r in a] == [r.metrics for r in b]


def test_queueing_lowers_staleness_below_little_but_not_the_rounds_in_flight():
    """A queued attempt ages no tokens: over-issue beyond the slots costs less staleness."""
    s = scenario(EXPONENTIAL, 60, 0.5, slots_per_instance=20)
    records = simulate_rounds(s, 430, 4)[30:]
    spans, sigma = mean_and_sigma(np.array([r.rounds_in_flight.mean() for r in records]))
    assert abs(spans - 2.0) <= 5 * sigma
    lags = np.concatenate([r.lags for r in records])
    assert lags.mean() < 0.8
    # Little once more: what is carried over a version, per completion, is the mean lag
    carried = np.array([r.carried / r.metrics.completed for r in records])
    got, sigma = mean_and_sigma(np.array([r.lags.mean() for r in records]) - carried)
    assert abs(got) <= 5 * sigma


# ---- the sweep ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("u", [0.1, 0.6, 2.0])
def test_best_lambda_of_the_sweep_is_the_closed_one(u):
    """P10: what is paid by token cancels, so c and the update's rate change nothing."""
    mean = 10_000
    s = scenario(
        ExponentialLengths(mean=mean),
        128,
        0.9,
        decode=DecodeStep(per_step="10 ms", per_attempt="0.05 ms"),
        update=Update(fixed=f"{u * 10e-3 * mean} s", per_token="10 us"),
    )
    grid = [x / 128 for x in range(28, 121, 7)]
    sweep = sweep_lambda(s, grid, rounds=80, seed=2)
    rates = np.array([p.attempts_per_s for p in sweep.points])
    # the curve is flat at the top: fit a parabola around it instead of trusting one point
    near = slice(max(0, sweep.best - 3), sweep.best + 4)
    fit = np.polyfit(np.array(grid)[near], rates[near], 2)
    top = -fit[1] / (2 * fit[0])
    closed = cf.optimal_stop_fraction_exponential(u * 10e-3 * mean, 10e-3 * mean)
    assert top == pytest.approx(closed, abs=0.04)
    nearest = int(np.abs(np.array(grid) - closed).argmin())
    assert rates[nearest] >= 0.985 * rates.max()


@pytest.mark.slow
def test_sweep_respects_the_bound_and_says_what_binds():
    s = scenario(
        EXPONENTIAL, 64, 0.9, decode=DecodeStep(per_step="1 us"), update=Update(fixed="0.3 s")
    )
    grid = [0.3, 0.5, 0.8, 0.9, 1.0]
    free = sweep_lambda(s, grid, rounds=20)
    assert free.best_point.stop_fraction == 0.5
    assert "fixed cost" in free.binding
    bound = sweep_lambda(s, grid, rounds=20, max_mean_staleness=0.2)
    assert bound.best_point.stop_fraction == 0.9
    assert "staleness bound" in bound.binding
    none = sweep_lambda(s, grid, rounds=20, max_mean_staleness=0.0)
    assert none.best_point.stop_fraction == 1.0
    with pytest.raises(InputError, match="no lambda of the sweep"):
        choose(free.points[:2], 0.1)
    with pytest.raises(InputError, match="at least one"):
        sweep_lambda(s, [])


def test_throughput_bound_rollouts_gain_nothing():
    s = scenario(EXPONENTIAL, 64, 0.9, decode=DecodeStep(per_attempt="1 us"))
    sweep = sweep_lambda(s, [0.5, 0.8, 1.0], rounds=60)
    rates = [p.attempts_per_s for p in sweep.points]
    assert max(rates) == pytest.approx(min(rates), rel=0.05)


def test_mean_staleness_of_a_report_is_exact_without_queueing():
    report = simulate(scenario(EXPONENTIAL, 60, 0.75), rounds=3)
    assert report.mean_staleness == pytest.approx(60 / 45 - 1, rel=1e-12)


def test_default_lambdas_hold_the_own_one_and_the_one_at_the_bound():
    fractions = default_fractions(0.87, 0.5)
    assert 0.87 in fractions
    assert 0.667 in fractions
    assert list(fractions) == sorted(set(fractions))
    assert fractions[-1] == 1.0
