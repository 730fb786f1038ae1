"""Functions of Triton kernels: casts that round, products and gates that hold everywhere.

The interpreter cuts where a card rounds, and multiplies bf16 wrongly; under `INTERPRETED`
numbers are put on the grid of the narrow format first, so that the cast is exact.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from flopwright.kernels.launch import INTERPRETED as _INTERPRETED

INTERPRETED = tl.constexpr(_INTERPRETED)
# Three products of the high and low parts of fp32 numbers keep 22 bits of their mantissas on
# tensor cores; full fp32 has none on NVIDIA, and spills.
FP32_PRODUCTS = tl.constexpr("ieee" if torch.version.hip else "tf32x3")
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Adding and taking away 1.5 * 2^23 rounds an fp32 below 2^22 to an integer, to nearest even.
_ROUND = tl.constexpr(12582912.0)


@triton.jit
def nearest(x):
    """Returns x rounded to the nearest integer, ties to even; |x| < 2^22."""
    return (x + _ROUND) - _ROUND


@triton.jit
def exponent(x):
    """Returns floor(log2 |x|) of fp32 numbers as int32; -127 for zero and subnormals."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127


@triton.jit
def power_of_two(e):
    """Returns 2^e in fp32 for int32 e from -126 to 127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def on_grid(x, LEAST: tl.constexpr, MANTISSA: tl.constexpr):
    """Returns fp32 x rounded to a float of MANTISSA bits whose least normal is 2^LEAST."""
    e = tl.maximum(exponent(x), LEAST) - MANTISSA
    # 2^-e in two factors: e may lie outside of what one fp32 holds.
    half = e // 2
    scaled = x * power_of_two(-half) * power_of_two(half - e)
    return nearest(scaled) * power_of_two(half) * power_of_two(e - half)


@triton.jit
def to_bf16(x):
    """Returns fp32 x as bf16, rounded to nearest even."""
    if INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(tl.bfloat16)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Returns x in fp32, fp16 or bf16, rounded to nearest even."""
    return to_bf16(x.to(tl.float32)) if dtype == tl.bfloat16 else x.to(dtype)


@triton.jit
def to_e4m3(x, dtype: tl.constexpr):
    """Returns fp32 x, within the format's range, as an E4M3 number rounded to nearest even."""
    if INTERPRETED:
        codes = on_grid(x, -6, 3).to(dtype).to(tl.uint8, bitcast=True)
        return tl.where(x == x, codes, 0x7F).to(tl.uint8).to(dtype, bitcast=True)  # NaN's code
    return x.to(dtype)


@triton.jit
def dot(a, b, acc):
    """Returns a @ b + acc in fp32; fp32 operands as three TF32 products where there are such."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    precision: tl.constexpr = FP32_PRODUCTS if a.dtype == tl.float32 else "ieee"
    return tl.dot(a, b, acc, input_precision=precision)


@triton.jit
def product(a, b):
    """Returns a @ b in fp32, as `dot` makes it."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    precision: tl.constexpr = FP32_PRODUCTS if a.dtype == tl.float32 else "ieee"
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def largest_of(x):
    """Returns the largest |x| of each row, NaN where a number of it is NaN: tl.max drops it."""
    lost = tl.max((x != x).to(tl.int32), 1) > 0
    return tl.where(lost, float("nan"), tl.max(tl.abs(x), 1))


@triton.jit
def within(x, LARGEST: tl.constexpr):
    """Returns x cut to -LARGEST .. LARGEST; NaN stays."""
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), x)


@triton.jit
def e4m3_scale(largest, LARGEST: tl.constexpr):
    """Returns largest / LARGEST, at least 2^-100: a tile of zeros has some scale; NaN stays."""
    scale = tl.div_rn(largest, LARGEST)
    return tl.where(scale == scale, tl.maximum(scale, 7.888609052210118e-31), scale)


@triton.jit
def sigmoid(x):
    """Returns 1 / (1 + e^-x) in fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Returns tanh x in fp32, with full relative accuracy near zero too."""
    square = x * x
    # The series up to x^9; the next term is below 1e-8 of x where |x| < 1/4.
    near = x * (
        1.0
        + square
        * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    )
    size = tl.abs(x)
    falling = tl.exp(-2.0 * size)
    far = (1.0 - falling) / (1.0 + falling)
    return tl.where(size < 0.25, near, tl.where(x < 0, -far, far))
