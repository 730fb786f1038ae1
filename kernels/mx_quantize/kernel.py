"""What a microscaling format makes of a tensor, as a Triton kernel in one pass."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from flopwright.kernels.device import cast, exponent, largest_of, on_grid, power_of_two
from flopwright.kernels.launch import ceil_div, launch, power_of_2, rows_of
from flopwright.kernels.mx_quantize.reference import BLOCK, ELEMENTS

_MOST: Final = 32  # blocks a program handles


@triton.jit
def _fake_quantize(
    x_ptr, y_ptr, width, x_stride, LEAST: tl.constexpr, MANTISSA: tl.constexpr, TOP: tl.constexpr,
    LARGEST: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * T + tl.arange(0, T)
    column = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = column < width
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    largest = largest_of(x)
    shared = tl.maximum(exponent(largest) - TOP, -127)
    # In two factors: 2^127 and 2^-127 times a number may not be one normal fp32.
    half = shared // 2
    up, down = power_of_two(-half)[:, None], power_of_two(half - shared)[:, None]
    scaled = on_grid(x * up * down, LEAST, MANTISSA)
    scaled = tl.minimum(tl.maximum(scaled, -LARGEST), LARGEST)
    y = scaled * power_of_two(half)[:, None] * power_of_two(shared - half)[:, None]
    y = tl.where((largest == largest)[:, None], y, float("nan"))
    tl.store(y_ptr + row * width + column, cast(y, y_ptr.dtype.element_ty), mask=inside)


def fake_quantize(x: Tensor, element: str) -> Tensor:
    """Returns x as the format keeps it; see the reference."""
    e, rows = ELEMENTS[element], rows_of(x)
    count, width = rows.shape
    y = x.new_empty(x.shape)
    blocks = ceil_div(width, BLOCK)
    t = min(_MOST, power_of_2(blocks))
    launch(
        _fake_quantize, (count, ceil_div(blocks, t)), rows, y, width, rows.stride(0),
        LEAST=e.least, MANTISSA=e.mantissa, TOP=e.top, LARGEST=e.largest, T=t,
    )  # fmt: skip
    return y
