"""Four-bit integers with one bf16 scale a group of columns, eight of them in an int32 word.

The layout of compressed-tensors' "pack-quantized": symmetric, the scale of a group is its
largest magnitude over 7.5, and the first number of a word stands in its low bits. Quotients
are rounded to the weights' own dtype first, as compressed-tensors does.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

GROUP: Final = 32
A_WORD: Final = 8
_HALF_RANGE: Final = 7.5  # of -8 .. 7
_OFFSET: Final = 8


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (words int32 [..., columns / 8], scales bf16 [..., columns / 32]).

    Args:
        x: [..., columns], columns a multiple of 32.
    """
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    scales = (groups.abs().amax(-1).float() / _HALF_RANGE).to(torch.bfloat16)
    # A group of zeros has some scale too.
    scales = torch.where(scales == 0, torch.finfo(x.dtype).eps, scales)
    quotients = (groups.float() / scales.float().unsqueeze(-1)).to(x.dtype)
    numbers = quotients.clamp(-_OFFSET, _OFFSET - 1).round().flatten(-2)
    return pack(numbers.to(torch.int8)), scales


def dequantize(words: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers [..., columns] in fp32."""
    groups = unpack(words).float().reshape(*scales.shape, -1)
    return (groups * scales.float().unsqueeze(-1)).flatten(-2)


def pack(numbers: Tensor) -> Tensor:
    """Returns int8 numbers -8 .. 7 [..., columns] as int32 words [..., columns / 8]."""
    shifted = (numbers + _OFFSET).to(torch.uint8)
    low, high = shifted[..., ::2], shifted[..., 1::2]
    return (low | high << 4).contiguous().view(torch.int32)


def unpack(words: Tensor) -> Tensor:
    """Returns the int8 numbers of int32 words."""
    halves = words.contiguous().view(torch.uint8)
    return torch.stack((halves & 0xF, halves >> 4), -1).flatten(-2).to(torch.int8) - _OFFSET
