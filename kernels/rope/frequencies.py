"""Rotary frequencies, with YaRN context extension in the DeepSeek form. No torch."""

from __future__ import annotations

import math

import numpy as np

from flopwright.ops import Array
from flopwright.spec.model import Rope, YarnScaling


def inverse_frequencies(rope: Rope, width: int) -> Array:
    """Returns the width / 2 angular frequencies, radians a position.

    Plain: theta^(-2i / width). YaRN (arXiv 2309.00071): f(beta) = width * ln(L0 / (2 pi
    beta)) / (2 ln theta) is the pair that turns beta times over the original context L0;
    between floor f(beta_fast) and ceil f(beta_slow) a linear ramp leads from the plain
    frequency to the one divided by `factor`.
    """
    plain = rope.theta ** (-np.arange(0, width, 2) / width)
    yarn = rope.scaling
    if yarn is None:
        return np.asarray(plain)

    def pair(turns: float) -> float:
        turned = yarn.original_max_seq_len / (2 * math.pi * turns)
        return width * math.log(turned) / (2 * math.log(rope.theta))

    low = max(math.floor(pair(yarn.beta_fast)), 0)
    high = min(math.ceil(pair(yarn.beta_slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return np.asarray(plain * (1 - ramp) + plain / yarn.factor * ramp)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def table_scale(yarn: YarnScaling | None) -> float:
    """Returns the multiplier of cos and sin: mscale(factor, mscale) / mscale(factor, all_dim)."""
    if yarn is None:
        return 1.0
    return _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(head_dim: int, yarn: YarnScaling | None) -> float:
    """Returns the factor on q.k: head_dim^-1/2, under YaRN times mscale(factor, all_dim)^2."""
    extra = _mscale(yarn.factor, yarn.mscale_all_dim) if yarn is not None else 1.0
    return float(head_dim**-0.5 * extra * extra)
