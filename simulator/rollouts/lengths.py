"""How long completions are: draws in order of submission, and the law's survival function.

Draws come from one sequential stream a seed, so that the n-th attempt has the same length
whatever lambda is: runs that differ in the policy alone are paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from flopwright.spec.rollout import (
    DeterministicLengths,
    EmpiricalLengths,
    ExponentialLengths,
    LengthSpec,
    LognormalLengths,
    ParetoLengths,
    longest,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Survival = Callable[[Floats], Floats]

_LONGEST: Final = 2**53  # beyond it a float no longer counts single tokens
_erfc = np.frompyfunc(math.erfc, 1, 1)


class LengthStream:
    """Tokens of the first, second, ... attempt ever submitted.

    Args:
        lengths: the law.
        seed: same seed, same lengths; how many are drawn at a time changes nothing.
        samples: attempts of a prompt; they are submitted one after the other.
        correlation: share of the variance of the normal score that the prompt decides.
        rng: where draws come from, in place of a generator of its own.
    """

    def __init__(
        self,
        lengths: LengthSpec,
        seed: int = 0,
        samples: int = 1,
        correlation: float = 0.0,
        rng: np.random.Generator | None = None,
    ) -> None:
        self._lengths = lengths
        self._rng = rng or np.random.default_rng([seed, 0x6C656E])
        self._prompts = np.random.default_rng([seed, 0x70726F])
        self._samples = samples
        self._correlation = correlation
        self._drawn = 0
        self._last_score = 0.0

    def draw(self, count: int, factor: float = 1.0) -> Ints:
        """Returns the lengths of the next `count` attempts, int64[count], each >= 1.

        Args:
            factor: by how much lengths have drifted, before the cap.
        """
        return self.draw_scored(count, factor)[0]

    def draw_scored(self, count: int, factor: float = 1.0) -> tuple[Ints, Floats]:
        """Returns the lengths and the normal score of each attempt's prompt (0: independent)."""
        if self._correlation <= 0:
            self._drawn += count
            return self._whole(self._raw(count), factor), np.zeros(count)
        prompts = (self._drawn + np.arange(count)) // self._samples
        known = (self._drawn - 1) // self._samples  # of the last attempt drawn so far
        self._drawn += count
        fresh = int(prompts[-1]) - known if count else 0
        scores = np.concatenate([[self._last_score], self._prompts.standard_normal(fresh)])
        mine = scores[prompts - known] if count else np.zeros(0)
        self._last_score = float(scores[-1])
        return self.redraw(mine, factor), mine

    def redraw(self, scores: Floats, factor: float = 1.0) -> Ints:
        """Returns lengths of attempts of prompts with these scores."""
        if self._correlation <= 0:
            return self._whole(self._raw(len(scores)), factor)
        rho = self._correlation
        own = self._rng.standard_normal(len(scores))
        z = math.sqrt(rho) * scores + math.sqrt(1 - rho) * own
        return self._whole(quantile_of_score(self._lengths, z), factor)

    def _whole(self, raw: Floats, factor: float) -> Ints:
        end = self._lengths.cap or _LONGEST
        grown = raw if factor == 1.0 else raw * factor
        return np.clip(np.ceil(grown), 1, end).astype(np.int64)

    def _raw(self, count: int) -> Floats:
        lengths, rng = self._lengths, self._rng
        match lengths:
            case ExponentialLengths():
                return rng.exponential(lengths.mean, count)
            case LognormalLengths():
                return rng.lognormal(log_median(lengths), lengths.sigma, count)
            case ParetoLengths():
                return lengths.minimum * (1.0 - rng.random(count)) ** (-1.0 / lengths.alpha)
            case DeterministicLengths():
                return np.full(count, float(lengths.tokens))
            case EmpiricalLengths():
                values, cumulative = _table(lengths)
                index = np.searchsorted(cumulative, rng.random(count), side="right")
                return values[np.minimum(index, len(values) - 1)]


def quantile_of_score(lengths: LengthSpec, z: Floats) -> Floats:
    """Returns the length whose rank is that of a normal score (no cap)."""
    tail = np.asarray(0.5 * _erfc(np.asarray(z) / math.sqrt(2.0)), dtype=np.float64)
    tail = np.maximum(tail, 1e-300)
    match lengths:
        case ExponentialLengths():
            return -lengths.mean * np.log(tail)
        case LognormalLengths():
            return np.asarray(np.exp(log_median(lengths) + lengths.sigma * z))
        case ParetoLengths():
            return np.asarray(lengths.minimum * tail ** (-1.0 / lengths.alpha))
        case DeterministicLengths():
            return np.full(len(z), float(lengths.tokens))
        case EmpiricalLengths():
            values, cumulative = _table(lengths)
            index = np.searchsorted(cumulative, 1.0 - tail, side="right")
            return values[np.minimum(index, len(values) - 1)]


@lru_cache(maxsize=4096)
def log_median(lengths: LognormalLengths) -> float:
    """Returns the mean of log L: log(mean) - sigma^2 / 2, or that which clips to the mean."""
    plain = math.log(lengths.mean) - lengths.sigma**2 / 2
    if lengths.mean_of == "law":
        return plain
    low, high = plain, plain + 1.0
    while clipped_mean(high, lengths) < lengths.mean:
        high += high - low
    for _ in range(100):
        middle = (low + high) / 2
        below = clipped_mean(middle, lengths) < lengths.mean
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


def clipped_mean(location: float, lengths: LognormalLengths) -> float:
    """Returns E[min(L, cap)] where log L has this mean."""
    assert lengths.cap is not None
    z = (math.log(lengths.cap) - location) / lengths.sigma
    below = math.exp(location + lengths.sigma**2 / 2) * _phi(z - lengths.sigma)
    return below + lengths.cap * _phi(-z)


def _phi(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2.0))


def clip_share(lengths: LengthSpec) -> float:
    """Returns the share of completions that the cap cuts off; 0 without a cap."""
    if lengths.cap is None:
        return 0.0
    x = np.array([float(lengths.cap)])
    return float(_uncapped(lengths, x)[0])


def _table(lengths: EmpiricalLengths) -> tuple[Floats, Floats]:
    """Returns sorted values and the cumulative share up to each."""
    values = np.array(lengths.values, dtype=np.float64)
    weights = np.array(lengths.weights or np.ones(len(values)), dtype=np.float64)
    order = np.argsort(values, kind="stable")
    return values[order], np.cumsum(weights[order]) / weights.sum()


def survival(lengths: LengthSpec) -> Survival:
    """Returns S(x) = P(L > x), with the cap: the tokens-as-real-numbers law.

    At whole x it is exactly the survival of the drawn (rounded-up) lengths.
    """
    end = longest(lengths)

    def capped(x: Floats) -> Floats:
        x = np.asarray(x, dtype=np.float64)
        plain = np.where(x < 0, 1.0, _uncapped(lengths, np.maximum(x, 0.0)))
        return plain if end is None else np.where(x >= end, 0.0, plain)

    return capped


def _uncapped(lengths: LengthSpec, x: Floats) -> Floats:
    match lengths:
        case ExponentialLengths():
            return np.asarray(np.exp(-x / lengths.mean))
        case LognormalLengths():
            with np.errstate(divide="ignore"):
                z = (np.log(x) - log_median(lengths)) / lengths.sigma
            return np.asarray(0.5 * _erfc(z / math.sqrt(2.0)), dtype=np.float64)
        case ParetoLengths():
            tail = (lengths.minimum / np.maximum(x, lengths.minimum)) ** lengths.alpha
            return np.asarray(tail)
        case DeterministicLengths():
            return np.asarray((x < lengths.tokens).astype(np.float64))
        case EmpiricalLengths():
            values, cumulative = _table(lengths)
            index = np.searchsorted(values, x, side="right")
            return 1.0 - np.concatenate([[0.0], cumulative])[index]
