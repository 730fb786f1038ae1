"""Microscaling numbers as bits (OCP MX specification 1.0): E2M1, E4M3 or E5M2 and E8M0 scales.

`kernels/mx_quantize` says what a number becomes; here it becomes bytes. A byte holds two E2M1
codes, the first of them in its low half, as in the releases of gpt-oss and compressed-tensors.
"""

from __future__ import annotations

from typing import Final, Literal

import torch
from torch import Tensor

from flopwright.kernels.mx_quantize.reference import BLOCK, ELEMENTS, Element

ScaleRule = Literal["floor", "even", "ceil", "rceil"]
SCALE_RULES: Final[tuple[ScaleRule, ...]] = ("floor", "even", "ceil", "rceil")
BIAS: Final = 127  # of E8M0
_NAN_SCALE: Final = 255
_CODES: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_VALUES: Final = torch.cat((_CODES, -_CODES))
# Halfway between two codes the even code wins: a code counts from its bound on, or from the
# next number above it.
_HALFWAY: Final = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
_UP_AT_TIE: Final = torch.tensor([False, True, False, True, False, True, False])
_BOUNDS: Final = torch.where(
    _UP_AT_TIE, _HALFWAY, torch.nextafter(_HALFWAY, torch.tensor(torch.inf))
)


def _blocks(x: Tensor) -> Tensor:
    """Returns x [..., columns] in fp32 as [..., columns / 32, 32]."""
    return x.float().reshape(*x.shape[:-1], -1, BLOCK)


def _exponent(x: Tensor) -> Tensor:
    """Returns floor(log2 x) of non-negative fp32 numbers as int32; -127 for zero and below."""
    return (x.view(torch.int32) >> 23) - BIAS


def _shared(largest: Tensor, element: Element, rule: ScaleRule) -> Tensor:
    """Returns the exponents of blocks from their largest magnitudes (fp32), as int32.

    "floor": the largest's exponent less the format's own, so that up to half of a binade
    saturates (the specification, 6.3). "even": likewise after rounding the largest to the
    element's mantissa. "ceil": rounded up to a power of two first. "rceil": the least scale
    with which nothing saturates.
    """
    if rule == "rceil":
        needed = largest / element.largest
        return _exponent(needed) + ((needed.view(torch.int32) & 0x7FFFFF) > 0).int()
    bits = largest.view(torch.int32)
    if rule == "even":
        bits = bits + (1 << (22 - element.mantissa))
    exponent = (bits >> 23) - BIAS
    if rule == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0).int()
    return exponent - element.top


def _scaled(x: Tensor, element: Element, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Returns (x over its blocks' scales in fp32, clamped; scales as E8M0 in uint8)."""
    blocks = _blocks(x)
    shared = _shared(blocks.abs().amax(-1), element, rule).clamp(-BIAS, BIAS)
    scaled = torch.ldexp(blocks, -shared.unsqueeze(-1)).flatten(-2)
    return scaled.clamp(-element.largest, element.largest), (shared + BIAS).to(torch.uint8)


def scale_values(scales: Tensor) -> Tensor:
    """Returns E8M0 scales (uint8) as fp32; 255 is not a number."""
    exact = torch.ldexp(torch.ones(scales.shape), scales.int() - BIAS)
    return torch.where(scales == _NAN_SCALE, torch.nan, exact)


def quantize_e2m1(x: Tensor, rule: ScaleRule = "floor") -> tuple[Tensor, Tensor]:
    """Returns (codes, scales) of x [..., columns], columns a multiple of 32.

    Codes are uint8 [..., columns / 2], scales E8M0 in uint8 [..., columns / 32].
    """
    scaled, scales = _scaled(x, ELEMENTS["e2m1"], rule)
    sizes = scaled.abs().contiguous()
    codes = torch.bucketize(sizes, _BOUNDS, right=True, out_int32=True).to(torch.uint8)
    codes |= scaled.signbit().to(torch.uint8) << 3
    low, high = codes[..., ::2], codes[..., 1::2]
    return low | high << 4, scales


def dequantize_e2m1(codes: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers [..., columns] of codes and scales in fp32."""
    halves = torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)
    blocks = _blocks(_VALUES[halves.int()])
    return (blocks * scale_values(scales).unsqueeze(-1)).flatten(-2)


def quantize_fp8(
    x: Tensor, rule: ScaleRule = "floor", element: Literal["e4m3", "e5m2"] = "e4m3"
) -> tuple[Tensor, Tensor]:
    """Returns (numbers like x in FP8, scales as E8M0 in uint8 [..., columns / 32])."""
    scaled, scales = _scaled(x, ELEMENTS[element], rule)
    narrow = torch.float8_e4m3fn if element == "e4m3" else torch.float8_e5m2
    return scaled.to(narrow), scales


def dequantize_fp8(numbers: Tensor, scales: Tensor) -> Tensor:
    """Returns FP8 numbers times their scales in fp32."""
    return (_blocks(numbers) * scale_values(scales).unsqueeze(-1)).flatten(-2)
