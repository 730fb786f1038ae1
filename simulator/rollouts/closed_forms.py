"""What theory says of rollout rounds: oracles for the simulator and hints for the report.

Symbols: M attempts in flight at the start of a round, m completions end it, lambda = m / M;
lengths L with survival S(x) = P(L > x) and mean mu; tau = tokens that an always-active
attempt advances in a round in steady state; H_n = 1 + 1/2 + ... + 1/n; J = rounds that an
attempt spans. "Fluid" means M without limit. Slots are unlimited unless said otherwise.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from flopwright.simulator.rollouts.lengths import Floats, Ints, Survival, log_median, survival
from flopwright.spec.rollout import (
    DecodeStep,
    DeterministicLengths,
    EmpiricalLengths,
    ExponentialLengths,
    LengthSpec,
    LognormalLengths,
    ParetoLengths,
    RolloutScenario,
    Stop,
    longest,
)

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_BERNOULLI: Final = (1 / 12, -1 / 720, 1 / 30240, -1 / 1209600)


def harmonic(n: int) -> float:
    """Returns H_n; above 100 by its asymptotic series, exact to the last digits."""
    if n <= 100:
        return sum(1.0 / k for k in range(1, n + 1))
    return math.log(n) + 0.5772156649015329 + 1 / (2 * n) - 1 / (12 * n**2) + 1 / (120 * n**4)


def zeta(s: float) -> float:
    """Returns the Riemann zeta function for s > 1, by Euler-Maclaurin from n = 20."""
    n = 20
    total: float = sum(k**-s for k in range(1, n)) + n ** (1 - s) / (s - 1) + n**-s / 2
    rising = s
    for k, b in enumerate(_BERNOULLI):
        total += b * rising * n ** (-s - 2 * k - 1)
        rising *= (s + 2 * k + 1) * (s + 2 * k + 2)
    return total


# ---- one phase ---------------------------------------------------------------------------


def phase_time_s(decode: DecodeStep, remaining: Ints, context: Ints, needed: int) -> float:
    """Returns the seconds of a phase of one instance with unlimited slots, exactly.

    T = a R_(m) + c sum(l) + kappa sum(l p + l (l - 1) / 2), with l_i = min(R_i, R_(m)): each
    step pays a once, each active token pays c, and the context of an attempt at its j-th
    step is p_i + j.

    Args:
        remaining: tokens each attempt still has to generate, R_i.
        context: its context at the start of the phase, p_i.
        needed: m.
    """
    last = int(np.sort(remaining)[needed - 1])
    steps = np.minimum(remaining, last).astype(object)  # exact integers
    tokens = int(steps.sum())
    read = int((steps * context + steps * (steps - 1) // 2).sum())
    return decode.a_s * last + decode.c_s * tokens + decode.kappa_s * read


def graham_bounds(lengths: Ints, slots: int) -> tuple[float, float]:
    """Returns the bounds in tokens of the time of any work-conserving order on `slots` slots."""
    work, most = float(lengths.sum()) / slots, float(lengths.max())
    return max(most, work), work + (1 - 1 / slots) * most


def slots_fifo_exponential(mean: float, attempts: int, needed: int, slots: int) -> float:
    """Returns E[time of the m-th completion] in tokens: mu * sum of 1 / min(slots, M - i + 1)."""
    return mean * sum(1 / min(slots, attempts - i + 1) for i in range(1, needed + 1))


# ---- steady state ------------------------------------------------------------------------


def mean_rounds(attempts: int, needed: int) -> float:
    """Returns E[J] = M / m (Little), whatever the lengths and the scheduler."""
    return attempts / needed


def mean_staleness(stop_fraction: float) -> float:
    """Returns the mean number of policy versions between start and completion: 1/lambda - 1."""
    return 1 / stop_fraction - 1


def tau_bounds(mean: float, stop_fraction: float) -> tuple[float, float]:
    """Returns lambda mu <= tau <= lambda mu / (1 - lambda), for every law."""
    high = math.inf if stop_fraction >= 1 else stop_fraction * mean / (1 - stop_fraction)
    return stop_fraction * mean, high


def tau_exponential(mean: float, stop_fraction: float) -> float:
    """Returns the fluid tau of exponential lengths, -mu ln(1 - lambda)."""
    return -mean * math.log1p(-stop_fraction)


def tau_exponential_finite(mean: float, attempts: int, needed: int) -> float:
    """Returns E[tau] of exponential lengths at finite M, mu (H_M - H_{M-m}), exactly."""
    return mean * (harmonic(attempts) - harmonic(attempts - needed))


def tau_pareto(minimum: float, alpha: float, stop_fraction: float) -> float:
    """Returns the fluid tau of Pareto lengths, x (zeta(alpha) lambda/(1-lambda))^(1/alpha).

    Holds where the result is at least the minimum x.
    """
    ratio = stop_fraction / (1 - stop_fraction)
    return float(minimum * (zeta(alpha) * ratio) ** (1 / alpha))


def tau_fluid(lengths: LengthSpec, stop_fraction: float) -> float:
    """Returns the fluid tau of any law: the root of E[ceil(L / tau)] = sum S(k tau) = 1/lambda.

    At lambda = 1 it is the longest length (infinite where there is none).
    """
    law, end = survival(lengths), longest(lengths)
    if stop_fraction >= 1:
        return math.inf if end is None else float(end)
    low, high = tau_bounds(mean_length(lengths), stop_fraction)
    for _ in range(80):
        middle = (low + high) / 2
        more = _mean_spans(law, middle, end) > 1 / stop_fraction
        low, high = (middle, high) if more else (low, middle)
    return (low + high) / 2


def _mean_spans(law: Survival, tau: float, end: int | None) -> float:
    """Returns E[ceil(L / tau)]; a tail beyond 4096 rounds is integrated."""
    terms = 4096 if end is None else min(4096, math.ceil(end / tau))
    total = float(law(np.arange(terms, dtype=np.float64) * tau).sum())
    if end is not None and terms * tau >= end:
        return total
    stop = terms * tau * 2.0**40 if end is None else end
    # sum over k >= n of S(k tau) is close to the integral from (n - 1/2) tau
    return total + _integral(law, (terms - 0.5) * tau, stop) / tau


def staleness_survival(lengths: LengthSpec, tau: float, rounds: int) -> float:
    """Returns P(J > rounds) = S(rounds * tau), the share that spans more rounds than that."""
    return float(survival(lengths)(np.array([rounds * tau]))[0])


def off_policy_share(tau: float, mean: float, stop_fraction: float) -> float:
    """Returns the share of tokens that older versions generated, (tau / mu) (1/lambda - 1)."""
    return tau / mean * mean_staleness(stop_fraction)


def steady_generation_s(scenario: RolloutScenario) -> float | None:
    """Returns the fluid seconds of a steady generation phase, or None where it has none.

    a tau + (m / instances) (c mu + kappa (p mu + E[L (L - 1)] / 2)): by conservation a round
    decodes as many tokens, and reads as much context, as m completions hold. Not for
    limited slots, nor where a moment is infinite.
    """
    share = -(-scenario.num_attempts // scenario.instances)
    if (scenario.slots_per_instance or share) < share or scenario.decode is None:
        return None
    if scenario.agent is not None or scenario.stop != Stop() or scenario.prefill is not None:
        return None
    decode, p = scenario.decode, scenario.prompt_tokens
    mean, square = mean_length(scenario.lengths), mean_square(scenario.lengths)
    tau = (
        expected_maximum(scenario.lengths, scenario.num_attempts)
        if scenario.stop_fraction >= 1
        else tau_fluid(scenario.lengths, scenario.stop_fraction)
    )
    each = decode.c_s * mean
    if decode.kappa_s > 0:
        each += decode.kappa_s * (p * mean + (square - mean) / 2)
    counted = scenario.stop_fraction * scenario.num_attempts / scenario.instances
    seconds = decode.a_s * tau + counted * each
    return seconds if math.isfinite(seconds) else None


def optimal_stop_fraction_exponential(fixed_s: float, decode_s: float) -> float:
    """Returns the lambda of most attempts/s at fixed M: lambda/(1-lambda) + ln(1-lambda) = u.

    u = fixed_s / decode_s, seconds of a round that do not depend on lambda over a * mu. What
    is paid by token cancels.
    """
    target, low, high = fixed_s / decode_s, 0.0, 1.0 - 1e-12
    for _ in range(100):
        middle = (low + high) / 2
        below = middle / (1 - middle) + math.log1p(-middle) < target
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


# ---- moments and maxima ------------------------------------------------------------------


def mean_length(lengths: LengthSpec) -> float:
    """Returns mu = E[L], the cap included; inf where there is none."""
    if lengths.cap is None:
        match lengths:
            case ExponentialLengths() | LognormalLengths():
                return float(lengths.mean)
            case ParetoLengths():
                return lengths.minimum * lengths.alpha / (lengths.alpha - 1)
    return _moment(lengths, 1)


def mean_square(lengths: LengthSpec) -> float:
    """Returns E[L^2], the cap included; inf where there is none."""
    if lengths.cap is None:
        match lengths:
            case ExponentialLengths():
                return 2.0 * lengths.mean**2
            case LognormalLengths():
                return lengths.mean**2 * math.exp(lengths.sigma**2)
            case ParetoLengths():
                if lengths.alpha <= 2:
                    return math.inf
                return lengths.minimum**2 * lengths.alpha / (lengths.alpha - 2)
    return _moment(lengths, 2)


def _moment(lengths: LengthSpec, power: int) -> float:
    end = longest(lengths)
    assert end is not None
    if isinstance(lengths, EmpiricalLengths):
        values = np.minimum(np.array(lengths.values, dtype=float), end)
        weights = np.array(lengths.weights or np.ones(len(values)))
        return float((values**power * (weights / weights.sum())).sum())
    if isinstance(lengths, DeterministicLengths):
        return float(end**power)
    law = survival(lengths)

    def integrand(x: Floats) -> Floats:
        return power * x ** (power - 1) * law(x)

    return _integral(integrand, 0.0, end, kink=_kink(lengths))


def expected_maximum(lengths: LengthSpec, attempts: int) -> float:
    """Returns E[longest of M], the integral of 1 - F^M; exact for exponential and Pareto."""
    if lengths.cap is None:
        match lengths:
            case ExponentialLengths():
                return lengths.mean * harmonic(attempts)
            case ParetoLengths():
                return pareto_order_statistic(lengths.minimum, lengths.alpha, attempts, attempts)
    law, last = survival(lengths), longest(lengths)
    if last is None:
        assert isinstance(lengths, LognormalLengths)
        end = math.exp(log_median(lengths) + 13 * lengths.sigma)
    else:
        end = float(last)

    def integrand(x: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(-np.expm1(attempts * np.log1p(-law(x))))

    if isinstance(lengths, (EmpiricalLengths, DeterministicLengths)):
        steps = np.unique(np.minimum(getattr(lengths, "values", (end,)), end)).astype(float)
        edges = np.concatenate([[0.0], steps])
        return float((integrand(edges[:-1]) * np.diff(edges)).sum())
    return _integral(integrand, 0.0, end, kink=_kink(lengths))


def pareto_order_statistic(minimum: float, alpha: float, attempts: int, rank: int) -> float:
    """Returns E[the rank-th smallest of M] of Pareto lengths, exactly."""
    g, over = math.lgamma, attempts - rank
    ratio = g(attempts + 1) + g(over + 1 - 1 / alpha) - g(over + 1) - g(attempts + 1 - 1 / alpha)
    return minimum * math.exp(ratio)


def _kink(lengths: LengthSpec) -> float:
    return float(lengths.minimum) if isinstance(lengths, ParetoLengths) else 0.0


def _integral(f: Survival, start: float, stop: float, kink: float = 0.0) -> float:
    """Returns the integral of a smooth decreasing function over panels that double in size."""
    floor = max(start, min(1.0, stop * 2.0**-60))  # lengths are whole tokens
    count = max(2, 2 * math.ceil(math.log2(stop / floor)) + 1)
    edges = {start, stop, *np.geomspace(floor, stop, count).tolist()}
    if start < kink < stop:
        edges.add(kink)
    points = np.array(sorted(edges))
    half = np.diff(points) / 2
    x = (points[:-1] + half)[:, None] + half[:, None] * _NODES
    return float(f(x.ravel()).reshape(x.shape) @ _WEIGHTS @ half)
