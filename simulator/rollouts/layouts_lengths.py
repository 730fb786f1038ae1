"""Lengths of responses whose mean, cut included, is given, with a correlation in groups."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from flopwright.errors import InputError, Violation
from flopwright.spec.rollouts.layout import GroupLengths

Ints = npt.NDArray[np.int64]


def _phi(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def clipped_mean(location: float, sigma: float, cap: float) -> float:
    """Returns E[min(exp(N(location, sigma^2)), cap)]."""
    if sigma <= 0:
        return min(math.exp(location), cap)
    z = (math.log(cap) - location) / sigma
    below = math.exp(location + sigma**2 / 2) * _phi(z - sigma)
    return below + cap * (1 - _phi(z))


def location_of(lengths: GroupLengths, sigma: float | None = None) -> float:
    """Returns the mean of log L before the cut, so that the cut mean (or cut share) is given.

    Args:
        sigma: in place of the lengths' own.

    Raises:
        InputError: neither a mean nor a cut share.
    """
    spread = lengths.sigma if sigma is None else sigma
    if lengths.cut_share is not None and lengths.mean is None:
        return math.log(lengths.cap) - spread * _normal_quantile(1 - lengths.cut_share)
    if lengths.mean is None:
        raise InputError(
            Violation(field="batch.lengths.mean", rule="unknown: give it, cut_share or a fit",
                      nearest_fix="add 'mean:'")
        )  # fmt: skip
    low, high = math.log(lengths.mean) - spread**2 - 1, math.log(lengths.cap) + 12 * spread + 1
    low = min(low, -5.0)
    for _ in range(200):
        middle = (low + high) / 2
        short = clipped_mean(middle, spread, lengths.cap) < lengths.mean
        low, high = (middle, high) if short else (low, middle)
    return (low + high) / 2


def _normal_quantile(p: float) -> float:
    low, high = -12.0, 12.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _phi(middle) < p else (low, middle)
    return (low + high) / 2


class GroupStream:
    """Lengths of the samples of one prompt after the other; same seed, same lengths."""

    def __init__(self, lengths: GroupLengths, samples: int, seed: int) -> None:
        self._lengths, self._samples = lengths, samples
        self._location = location_of(lengths)
        self._rng = np.random.default_rng([seed, 0x67726F])

    def draw(self, prompts: int) -> Ints:
        """Returns tokens, int64 [prompts, samples], from 1 to the cap.

        log L = location + sigma (sqrt(share) Z_prompt + sqrt(1 - share) Z_sample).
        """
        lengths = self._lengths
        common = self._rng.standard_normal((prompts, 1))
        own = self._rng.standard_normal((prompts, self._samples))
        share = lengths.group_share
        z = math.sqrt(share) * common + math.sqrt(1 - share) * own
        drawn = np.rint(np.exp(self._location + lengths.sigma * z))
        return np.clip(drawn, 1, lengths.cap).astype(np.int64)
