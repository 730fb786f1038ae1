"""Numbers of the release formats: bits against closed forms, errors against half a step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flopwright.errors import InputError
from flopwright.kernels.mx_quantize.reference import fake_quantize
from flopwright.models.formats import int4, mx
from flopwright.models.formats.codecs import TORCH_DTYPES, check_finite, decode, encode
from flopwright.models.formats.layout import LAYOUTS, LayoutName

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def matrix(seed: int, rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows of very different sizes, a row of zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    sizes = torch.exp2(torch.randint(-30, 30, (rows, 1), generator=generator).float())
    x = x * sizes
    x[rows // 2] = 0
    return x.to(dtype)


shapes = st.tuples(st.integers(0, 2**31), st.integers(1, 300), st.integers(1, 300))


@given(shapes)
@settings(max_examples=25, deadline=None)
def test_block_fp8_is_within_half_a_step(case: tuple[int, int, int]) -> None:
    x = matrix(*case)
    parts = encode(LAYOUTS["block_fp8"], x)
    back = decode(LAYOUTS["block_fp8"], parts)
    scales = parts[".weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    scaled = x / scales[: x.shape[0], : x.shape[1]]
    # E4M3 has 3 bits of mantissa and exponents from -6 on: half a step of the scaled number,
    # and what dividing and multiplying in fp32 round besides.
    exponent = torch.frexp(scaled).exponent.sub(1).clamp_min(-6)
    half = torch.ldexp(torch.ones(x.shape), exponent - 4) * (x.abs() / scaled.abs()).nan_to_num(
        0, 0, 0
    )
    assert ((back - x).abs() <= half + 4e-7 * x.abs()).all()
    assert parts[".weight"].float().abs().max() <= 448


@given(st.integers(0, 2**31), st.sampled_from(["e2m1", "e4m3", "e5m2"]), st.booleans())
@settings(max_examples=25, deadline=None)
def test_mx_bits_mean_what_the_kernels_say(seed: int, element: str, narrow: bool) -> None:
    x = matrix(seed, 9, 96, torch.bfloat16 if narrow else torch.float32)
    if element == "e2m1":
        back = mx.dequantize_e2m1(*mx.quantize_e2m1(x))
    else:
        back = mx.dequantize_fp8(*mx.quantize_fp8(x, "floor", element))  # type: ignore[arg-type]
    assert torch.equal(back.to(x.dtype), fake_quantize(x, element))


@pytest.mark.parametrize("rule", mx.SCALE_RULES)
def test_e2m1_takes_the_nearest_number_of_its_grid(rule: mx.ScaleRule) -> None:
    x = matrix(3, 16, 256)
    codes, scales = mx.quantize_e2m1(x, rule)
    back = mx.dequantize_e2m1(codes, scales)
    steps = mx.scale_values(scales).repeat_interleave(32, -1)
    best = (x.abs() / steps).unsqueeze(-1).sub(GRID).abs().amin(-1)
    assert torch.equal((x - back).abs() / steps, best)
    if rule == "rceil":  # nothing saturates
        assert (x.abs() <= 6 * steps).all()


def test_e2m1_ties_go_to_the_even_code() -> None:
    x = torch.zeros(1, 32)
    x[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75])
    codes, scales = mx.quantize_e2m1(x)
    assert scales.tolist() == [[127]]
    assert codes[0, :5].tolist() == [0x07, 0x22, 0x44, 0x66, 0x0A]


@given(st.integers(0, 2**31), st.booleans())
@settings(max_examples=25, deadline=None)
def test_int4_is_within_half_a_step(seed: int, narrow: bool) -> None:
    dtype = torch.bfloat16 if narrow else torch.float32
    x = matrix(seed, 7, 128, dtype)
    words, scales = int4.quantize(x)
    back = int4.dequantize(words, scales)
    steps = scales.float().repeat_interleave(32, -1)
    numbers = int4.unpack(words).float()
    assert torch.equal(back, numbers * steps)
    # -8 is a number and 8 none: the largest of a group, 7.5 steps, may lose a whole half step,
    # and its bf16 scale (and bf16 quotient) 1/256 of it.
    slack = 7.5 / 128 if narrow else 7.5 / 256
    assert ((back - x.float()).abs() <= (0.5 + slack) * steps).all()


@given(st.integers(0, 2**31))
@settings(max_examples=25, deadline=None)
def test_packing_is_a_bijection(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-8, 8, (3, 64), generator=generator, dtype=torch.int8)
    words = int4.pack(numbers)
    assert torch.equal(int4.unpack(words), numbers)
    first = sum((int(n) + 8) << (4 * i) for i, n in enumerate(numbers[0, :8]))
    assert int(words[0, 0]) & 0xFFFFFFFF == first


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_have_the_shapes_and_dtypes_of_the_layout(name: LayoutName) -> None:
    layout, shape = LAYOUTS[name], (192, 160)
    x = matrix(1, *shape, dtype=torch.bfloat16)
    parts = encode(layout, x)
    assert parts.keys() == {p.ending for p in layout.parts}
    for part in layout.parts:
        tensor = parts[part.ending]
        assert tuple(tensor.shape) == part.shape(shape), part.ending
        assert tensor.dtype == TORCH_DTYPES[part.dtypes[0]], part.ending
    assert sum(t.nbytes for t in parts.values()) == layout.nbytes(shape)
    described = 16 if name == "int4_g32" else 0  # its shape, two int64
    assert layout.nbytes(shape) == layout.format.tensor_bytes(shape) + described
    assert layout.weight_shape(tuple(parts[layout.parts[0].ending].shape)) == shape
    assert tuple(decode(layout, parts).shape) == shape


@pytest.mark.parametrize("name", ["mxfp4", "mxfp4_blocks"])
def test_mxfp4_is_exact_in_bf16_and_its_own_fixed_point(name: LayoutName) -> None:
    parts = encode(LAYOUTS[name], matrix(5, 8, 64))
    back = decode(LAYOUTS[name], parts)
    assert torch.equal(back.bfloat16().float(), back)
    again = encode(LAYOUTS[name], back.bfloat16())
    zero = back.unflatten(-1, (-1, 32)).abs().amax(-1) == 0
    for ending in parts:
        same = again[ending] == parts[ending]
        assert (same | zero if ending.endswith(("scale", "scales")) else same).all()


def test_numbers_that_are_not_finite_are_refused() -> None:
    scales = torch.full((1, 1), 255, dtype=torch.uint8)
    x = mx.dequantize_e2m1(torch.full((1, 16), 0x11, dtype=torch.uint8), scales)
    with pytest.raises(InputError, match=r"experts\.3\.w1.*not a number"):
        check_finite(x, "experts.3.w1")
