"""YaRN's constants (arXiv 2309.00071, DeepSeek's form): which dimensions are stretched."""

from __future__ import annotations

import math

from flopwright.spec.model import YarnScaling


def correction_dim(rotations: float, rope_dim: int, theta: float, original_max: int) -> float:
    """Returns the rotary dimension that turns `rotations` times over the original context.

    f(b) = d * ln(L0 / (2 pi b)) / (2 ln theta).
    """
    return rope_dim * math.log(original_max / (2 * math.pi * rotations)) / (2 * math.log(theta))


def correction_range(scaling: YarnScaling, rope_dim: int, theta: float) -> tuple[int, int]:
    """Returns (low, high): dimensions below low keep their frequency, above high are divided."""
    low, high = (
        correction_dim(beta, rope_dim, theta, scaling.original_max_seq_len)
        for beta in (scaling.beta_fast, scaling.beta_slow)
    )
    return max(math.floor(low), 0), min(math.ceil(high), rope_dim - 1)
