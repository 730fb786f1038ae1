"""How long completions are: draws in order of submission, and the law's survival function.

Draws come from one sequential stream a seed, so that the n-th attempt has the same length
whatever lambda is: runs that differ in the policy alone are paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """

    def __init__(self, lengths: LengthSpec, seed: int) -> None:
        self._lengths = lengths
        self._rng = np.random.default_rng([seed, 0x6C656E])

    def draw(self, count: int) -> Ints:
        """Returns the lengths of the next `count` attempts, int64[count], each >= 1."""
        end = longest(self._lengths) or _LONGEST
        raw = np.ceil(self._raw(count))
        return np.clip(raw, 1, end).astype(np.int64)

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


def log_median(lengths: LognormalLengths) -> float:
    """Returns the mean of log L: log(mean) - sigma^2 / 2."""
    return math.log(lengths.mean) - lengths.sigma**2 / 2


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
