"""Whether a step's loss is out of line with those before it.

The yardstick is robust: the median of the last losses, and their scatter by the median difference
of a loss and the next (times 1.4826 / sqrt 2, which makes it the standard deviation where losses
are normal). A few losses that are off move neither, and a loss that falls fast, as at a run's
beginning, does not look like one that scatters. A loss that is higher than the median by more than
SIGMAS scatters is a spike; so is one that is no number, whatever came before.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

WINDOW: Final = 64
# Fewer losses than this say nothing of their scatter.
ENOUGH: Final = 16
SIGMAS: Final = 8.0
# Losses that hardly differ would make every ripple a spike: scatter is at least this share of
# the median.
_LEAST_SCATTER: Final = 0.01
_NORMAL: Final = 1.4826 / math.sqrt(2)


@dataclass(frozen=True, slots=True)
class Spike:
    """A step whose loss is out of line.

    Attributes:
        what: "loss" or "gradient norm": which of both, with `value`.
        median, scatter: of the losses before it, nats a token; None where the value is no number.
    """

    step: int
    what: str
    value: float
    median: float | None = None
    scatter: float | None = None

    @property
    def bound(self) -> float:
        """What a loss must not exceed, nats a token; infinite where no number is refused alone."""
        if self.median is None or self.scatter is None:
            return math.inf
        return self.median + SIGMAS * self.scatter


def spike_in(
    step: int, loss: float, gradient_norm: float, before: Sequence[float]
) -> Spike | None:
    """Returns the spike that a step is, if it is one.

    Args:
        before: losses of the steps before it, oldest first; the last WINDOW of them count.
    """
    if not math.isfinite(loss):
        return Spike(step, "loss", loss)
    if not math.isfinite(gradient_norm):
        return Spike(step, "gradient norm", gradient_norm)
    recent = before[-WINDOW:]
    if len(recent) < ENOUGH:
        return None
    middle = median(recent)
    scatter = _NORMAL * median(abs(b - a) for a, b in pairwise(recent))
    spike = Spike(step, "loss", loss, middle, max(scatter, _LEAST_SCATTER * abs(middle)))
    return spike if loss > spike.bound else None
