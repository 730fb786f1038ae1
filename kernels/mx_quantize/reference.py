"""Microscaling formats in plain torch (OCP MX specification 1.0): the oracle of `op.py`.

Blocks of 32 along the last dimension share a power of two (E8M0); its exponent is that of the
largest magnitude less that of the format's largest number, rounded down, so that numbers
above the format's range saturate. Kimi K3's routed experts train with MXFP4 weights and MXFP8
activations.
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
    """Returns floor(log2 |x|) as int32; far below any exponent for zero."""
    _, e = torch.frexp(x)
    return torch.where(x == 0, torch.full_like(e, -1000), e - 1)


def scales(x: Tensor) -> Tensor:
    """Returns the block maxima's exponents [..., blocks] as int32, before the format's own."""
    width = x.shape[-1]
    padded = F.pad(x, (0, -width % BLOCK))
    return _exponent(padded.reshape(*x.shape[:-1], -1, BLOCK).abs().amax(-1))


def fake_quantize(x: Tensor, element: str) -> Tensor:
    """Returns x as the format keeps it, in the dtype of x.

    Args:
        element: "e2m1" (MXFP4), "e4m3" or "e5m2" (MXFP8).
    """
    e = ELEMENTS[element]
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).double()
    shared = (scales(wide) - e.top).clamp(_LEAST_SCALE, 127)
    shared = shared.repeat_interleave(BLOCK, -1)[..., : x.shape[-1]]
    scaled = torch.ldexp(wide, -shared)
    step = _exponent(scaled).clamp_min(e.least) - e.mantissa
    rounded = torch.ldexp(torch.ldexp(scaled, -step).round(), step)
    kept = torch.ldexp(rounded.clamp(-e.largest, e.largest), shared)
    return kept.to(x.dtype)
