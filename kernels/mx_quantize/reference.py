"""Microscaling formats in plain torch (OCP MX specification 1.0): the oracle of `op.py`.

Blocks of 32 along the last dimension share a power of two (E8M0); its exponent is that of the
largest magnitude less that of the format's largest number, rounded down, so that numbers
above the format's range saturate. A block with NaN is all NaN (of MXFP4 only the scale can say
so); infinity stays what it is, beyond any scale. Kimi K3's routed experts train with MXFP4
weights and MXFP8 activations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK: Final = 32
_LEAST_SCALE: Final = -127  # E8M0 has the exponents -127 .. 127


@dataclass(frozen=True, slots=True)
class Element:
    """A narrow float: bits of mantissa, exponents of its least normal and largest number."""

    mantissa: int
    least: int
    top: int
    largest: float


ELEMENTS: Final = {
    "e2m1": Element(1, 0, 2, 6.0),
    "e4m3": Element(3, -6, 8, 448.0),
    "e5m2": Element(2, -14, 15, 57344.0),
}


def _exponent(x: Tensor) -> Tensor:
    """Returns floor(log2 |x|) as int32; far below any exponent for zero, fp32's for infinity."""
    _, e = torch.frexp(x)
    found = torch.where(x == 0, torch.full_like(e, -1000), e - 1)
    return torch.where(x.isfinite(), found, torch.full_like(e, 128))


def _blocks(x: Tensor) -> Tensor:
    """Returns x as [..., blocks, 32], zeros behind its end."""
    return F.pad(x, (0, -x.shape[-1] % BLOCK)).reshape(*x.shape[:-1], -1, BLOCK)


def _spread(of_blocks: Tensor, width: int) -> Tensor:
    """Returns what blocks have in common for each of their numbers."""
    return of_blocks.repeat_interleave(BLOCK, -1)[..., :width]


def scales(x: Tensor) -> Tensor:
    """Returns the block maxima's exponents [..., blocks] as int32, before the format's own."""
    return _exponent(_blocks(x).abs().amax(-1))


def fake_quantize(x: Tensor, element: str) -> Tensor:
    """Returns x as the format keeps it, in the dtype of x.

    Args:
        element: "e2m1" (MXFP4), "e4m3" or "e5m2" (MXFP8).
    """
    e = ELEMENTS[element]
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).double()
    shared = _spread((scales(wide) - e.top).clamp(_LEAST_SCALE, 127), x.shape[-1])
    scaled = torch.ldexp(wide, -shared)
    step = _exponent(scaled).clamp_min(e.least) - e.mantissa
    rounded = torch.ldexp(torch.ldexp(scaled, -step).round(), step)
    kept = torch.ldexp(rounded.clamp(-e.largest, e.largest), shared)
    kept = torch.where(wide.isinf(), wide, kept)
    lost = _spread(_blocks(wide.isnan()).any(-1), x.shape[-1])
    return kept.masked_fill(lost, float("nan")).to(x.dtype)
