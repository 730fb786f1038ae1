"""E4M3 numbers with one scale a tile of 1 x 128 (arXiv 2412.19437, 3.3), in plain torch.

Weights have one scale a block of 128 x 128 (the same, 3.3.2).

Tiles lie along the last dimension and end with it, so that a row's numbers do not depend on
the rows beside it: any split of the rows over ranks narrows them alike.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

TILE: Final = 128
LARGEST: Final = 448.0  # of E4M3 (arXiv 2209.05433, table 1)
_SMALLEST_SCALE: Final = 2.0**-100  # a tile of zeros has some scale too


def tiles(width: int) -> int:
    """Returns the tiles of a row."""
    return -(-width // TILE)


def _tiled(x: Tensor) -> Tensor:
    """Returns x as [..., tiles, 128], zeros behind its end."""
    width = x.shape[-1]
    padded = F.pad(x, (0, tiles(width) * TILE - width))
    return padded.reshape(*x.shape[:-1], tiles(width), TILE)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (numbers like x in float8_e4m3fn, scales [..., tiles] in fp32).

    The scale of a tile is its largest magnitude over 448; numbers are rounded to nearest even.
    """
    wide = _tiled(x.to(torch.float64) if x.dtype == torch.float64 else x.float())
    scales = (wide.abs().amax(-1) / LARGEST).float().clamp_min(_SMALLEST_SCALE)
    scaled = (wide / scales.unsqueeze(-1).to(wide.dtype)).clamp(-LARGEST, LARGEST)
    numbers = scaled.flatten(-2)[..., : x.shape[-1]]
    return numbers.to(torch.float8_e4m3fn), scales


def dequantize(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers times scales in `dtype`; the product is made in fp32 or wider."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    product = _tiled(numbers.to(wide)) * scales.unsqueeze(-1).to(wide)
    return product.flatten(-2)[..., : numbers.shape[-1]].contiguous().to(dtype)


def _blocked(x: Tensor) -> Tensor:
    """Returns a matrix as [block rows, 128, block columns, 128], zeros behind its ends."""
    rows, width = x.shape
    padded = F.pad(x, (0, tiles(width) * TILE - width, 0, tiles(rows) * TILE - rows))
    return padded.reshape(tiles(rows), TILE, tiles(width), TILE)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (numbers like x [rows, columns], scales [rows / 128, columns / 128] in fp32).

    Blocks at the ends are smaller; a scale is the largest magnitude of its block over 448.
    """
    wide = _blocked(x.to(torch.float64) if x.dtype == torch.float64 else x.float())
    scales = (wide.abs().amax((1, 3)) / LARGEST).float().clamp_min(_SMALLEST_SCALE)
    spread = scales[:, None, :, None].to(wide.dtype)
    scaled = (wide / spread).clamp(-LARGEST, LARGEST)
    numbers = scaled.flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    return numbers.to(torch.float8_e4m3fn), scales


def dequantize_blocks(numbers: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns numbers times the scales of their blocks in `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    product = _blocked(numbers.to(wide)) * scales[:, None, :, None].to(wide)
    flat = product.flatten(2).flatten(0, 1)
    return flat[: numbers.shape[0], : numbers.shape[1]].contiguous().to(dtype)
