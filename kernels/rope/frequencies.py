"""Rotary frequencies and their context extensions: YaRN, linear, Llama 3's. No torch."""

from __future__ import annotations

import math

import numpy as np

from flopwright.ops import Array
from flopwright.spec.model import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    YarnScaling,
)


def inverse_frequencies(rope: Rope, width: int) -> Array:
    """Returns the width / 2 angular frequencies, radians a position.

    Plain: theta^(-2i / width); the scalings divide some or all of them by `factor`.
    """
    plain = np.asarray(rope.theta ** (-np.arange(0, width, 2) / width))
    match rope.scaling:
        case YarnScaling() as yarn:
            return _yarn(plain, yarn, rope.theta, width)
        case Llama3Scaling() as llama3:
            return _llama3(plain, llama3)
        case LinearScaling() as linear:
            return plain / linear.factor
        case None:
            return plain


def _llama3(plain: Array, llama3: Llama3Scaling) -> Array:
    """Returns a mixture by how often a pair turns over the original context; see the spec."""
    turns = plain * llama3.original_max_seq_len / (2 * math.pi)
    span = llama3.high_freq_factor - llama3.low_freq_factor
    kept = np.clip((turns - llama3.low_freq_factor) / span, 0, 1)
    return np.asarray(plain * kept + plain / llama3.factor * (1 - kept))


def _yarn(plain: Array, yarn: YarnScaling, theta: float, width: int) -> Array:
    """Returns the frequencies of YaRN (arXiv 2309.00071).

    f(beta) = width * ln(L0 / (2 pi beta)) / (2 ln theta) is the pair that turns beta times
    over the original context L0; between floor f(beta_fast) and ceil f(beta_slow) a linear
    ramp leads from the plain frequency to the one divided by `factor`.
    """

    def pair(turns: float) -> float:
        turned = yarn.original_max_seq_len / (2 * math.pi * turns)
        return width * math.log(turned) / (2 * math.log(theta))

    first, last = pair(yarn.beta_fast), pair(yarn.beta_slow)
    if yarn.truncate:
        first, last = math.floor(first), math.ceil(last)
    low, high = max(first, 0), min(last, width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return np.asarray(plain * (1 - ramp) + plain / yarn.factor * ramp)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def table_scale(scaling: RopeScaling | None) -> float:
    """Returns the multiplier of cos and sin: mscale(factor, mscale) / mscale(factor, all_dim).

    1 for everything but YaRN.
    """
    if not isinstance(scaling, YarnScaling):
        return 1.0
    whole = _mscale(scaling.factor, scaling.mscale_all_dim)
    return _mscale(scaling.factor, scaling.mscale) / whole


def softmax_scale(head_dim: int, scaling: RopeScaling | None) -> float:
    """Returns the factor on q.k: head_dim^-1/2, under YaRN times mscale(factor, all_dim)^2."""
    extra = 1.0
    if isinstance(scaling, YarnScaling):
        extra = _mscale(scaling.factor, scaling.mscale_all_dim)
    return float(head_dim**-0.5 * extra * extra)
