"""More of what theory says: prompts as units, budgets, age limits, cache demand, agents, gains.

Symbols as in closed_forms.py. S is a survival function over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flopwright.simulator.rollouts.closed_forms import harmonic
from flopwright.simulator.rollouts.lengths import Floats, Survival


def group_survival(survival: Survival, samples: int, correlation: float = 0.0) -> Survival:
    """Returns P(the longest of a prompt's samples > x).

    1 - F^K where samples are independent, S itself where the prompt decides all; only these
    two have a closed form.
    """
    if correlation >= 1:
        return survival
    assert correlation == 0, "no closed form in between"

    def longest(x: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            return np.asarray(-np.expm1(samples * np.log1p(-survival(x))))

    return longest


def tau_of(survival: Survival, stop_fraction: float, mean: float, terms: int = 4096) -> float:
    """Returns the fluid tau of any survival function: the root of sum S(k tau) = 1 / lambda.

    By bisection between lambda mu and lambda mu / (1 - lambda), which hold for every law.
    """
    low, high = stop_fraction * mean, stop_fraction * mean / (1 - stop_fraction)
    k = np.arange(terms, dtype=np.float64)
    for _ in range(80):
        middle = (low + high) / 2
        more = float(survival(k * middle).sum()) > 1 / stop_fraction
        low, high = (middle, high) if more else (low, middle)
    return (low + high) / 2


def tau_small_fraction(mean: float, stop_fraction: float) -> float:
    """Returns tau for lambda near 0: lambda mu / (1 - lambda / 2)."""
    return stop_fraction * mean / (1 - stop_fraction / 2)


def budget_completions(survival: Survival, attempts: int, budget: int, terms: int = 4096) -> float:
    """Returns completions of a steady round in which everybody may generate `budget` tokens.

    m = M / E[ceil(L / B)]; the staleness law is that of tau = B.
    """
    return attempts / float(survival(np.arange(terms, dtype=np.float64) * budget).sum())


def phase_by_counts_s(order: Sequence[float], step_s: Sequence[float]) -> float:
    """Returns the seconds until the m-th of M finishes where a step of b attempts takes t(b).

    Args:
        order: remaining tokens, ascending; the first m of them are waited for.
        step_s: t(b) for b = 0, 1, ..., M. T = sum of (R_j - R_{j-1}) t(M - j + 1).
    """
    attempts = len(step_s) - 1
    before = [0.0, *order[:-1]]
    return sum(
        (r - b) * step_s[attempts - j] for j, (r, b) in enumerate(zip(order, before, strict=True))
    )


def exponential_phase_s(
    mean: float, attempts: int, needed: int, per_step_s: float, per_attempt_s: float
) -> float:
    """Returns E[T] of exponential lengths and a step a + c b: mu (a (H_M - H_{M-m}) + c m)."""
    passed = harmonic(attempts) - harmonic(attempts - needed)
    return mean * (per_step_s * passed + per_attempt_s * needed)


def gain(stop_fraction: float, expected_longest: float, tau: float) -> float:
    """Returns attempts/s over those of lambda = 1, latency-bound: lambda E[max] / tau."""
    return stop_fraction * expected_longest / tau


def gain_of_whole(generation_share: float, generation_gain: float) -> float:
    """Returns the gain of the whole iteration where generation is a share of it (Amdahl)."""
    return 1 / (1 - generation_share + generation_share / generation_gain)


# ---- cache -------------------------------------------------------------------------------


def cache_demand(survival: Survival, prompt_tokens: float, x: Floats) -> Floats:
    """Returns resident tokens an attempt, x tokens after all began together: (p + x) S(x)."""
    return np.asarray((prompt_tokens + x) * survival(x))


def steady_cache_demand(
    survival: Survival, prompt_tokens: float, tau: float, x: Floats, terms: int = 200
) -> Floats:
    """Returns resident tokens over m, x tokens into a steady round, 0 <= x < tau.

    U(x) / m = sum over k of (p + k tau + x) S(k tau + x): those that are k rounds old.
    """
    at = x[:, None] + np.arange(terms) * tau
    return np.asarray(((prompt_tokens + at) * survival(at)).sum(axis=1))


def steady_cache_peak(survival: Survival, prompt_tokens: float, tau: float, needed: int) -> float:
    """Returns the most resident tokens of a steady round; no preemption iff the cache holds it."""
    x = np.linspace(0, tau, 2000, endpoint=False)
    return needed * float(steady_cache_demand(survival, prompt_tokens, tau, x).max())


def parked_tokens(
    survival: Survival, prompt_tokens: float, tau: float, needed: int, terms: int = 2000
) -> float:
    """Returns tokens of context parked at a boundary: m sum k >= 1 of (p + k tau) S(k tau)."""
    at = np.arange(1, terms, dtype=np.float64) * tau
    return needed * float(((prompt_tokens + at) * survival(at)).sum())


def reuse_bandwidth(
    kv_bytes_per_token: float, prefill_token_s: float, prefill_pair_s: float, context: float
) -> float:
    """Returns the bandwidth above which loading a cache beats computing it again.

    Bytes of the context over the seconds of its prefill (Mooncake, FAST'25, Eq. 2).
    """
    seconds = prefill_token_s * context + prefill_pair_s * context**2 / 2
    return kv_bytes_per_token * context / seconds


# ---- age limits --------------------------------------------------------------------------


def dropped_steady(
    survival: Survival, tau: float, max_versions: int, attempts: int
) -> tuple[float, float, float]:
    """Returns (starts, completions, dropped tokens) of a round that drops what is too old.

    An attempt has eta + 1 rounds: M = s sum over k <= eta of S(k tau), a start completes with
    F((eta + 1) tau) and wastes (eta + 1) tau otherwise.
    """
    ages = np.arange(max_versions + 1, dtype=np.float64) * tau
    starts = attempts / float(survival(ages).sum())
    late = float(survival(np.array([(max_versions + 1) * tau]))[0])
    return starts, starts * (1 - late), starts * late * (max_versions + 1) * tau


# ---- agents ------------------------------------------------------------------------------


def decoding_share(decode_s: float, tool_s: float) -> float:
    """Returns the share of attempts in flight that are on a GPU (renewal-reward)."""
    return decode_s / (decode_s + tool_s)


def pausing_saves_s(think_s: float, checkpoint_s: float, resume_s: float) -> float:
    """Returns sandbox-seconds that a pause saves in one turn; below 0 it costs."""
    return think_s - checkpoint_s - resume_s
