"""A weight as the tensors of its release format, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from flopwright.errors import InputError, Violation
from flopwright.kernels.fp8_quantize.reference import (
    dequantize_blocks,
    quantize_blocks,
)
from flopwright.kernels.mx_quantize.reference import BLOCK
from flopwright.models.formats import int4, mx
from flopwright.models.formats.layout import Layout, layout_for

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16,
    "U16": torch.uint16, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32,
    "U32": torch.uint32, "F32": torch.float32, "I64": torch.int64, "U64": torch.uint64,
    "F64": torch.float64,
}  # fmt: skip


def encode(layout: Layout, x: Tensor, rule: mx.ScaleRule = "floor") -> dict[str, Tensor]:
    """Returns the parts of a matrix, or of whole blocks of its rows, by their endings.

    Args:
        x: [..., rows, columns], floating point.
        rule: how MXFP4's scales are chosen.
    """
    if layout.name == "block_fp8":
        return _named(layout, *quantize_blocks(x))
    if layout.name == "int4_g32":
        return _named(layout, *int4.quantize(x), torch.tensor(x.shape))
    codes, scales = mx.quantize_e2m1(x, rule)
    if layout.name == "mxfp4_blocks":
        codes = codes.reshape(*codes.shape[:-1], -1, BLOCK // 2)
    return _named(layout, codes, scales)


def _named(layout: Layout, *tensors: Tensor) -> dict[str, Tensor]:
    return {p.ending: t.contiguous() for p, t in zip(layout.parts, tensors, strict=True)}


def decode(layout: Layout, parts: Mapping[str, Tensor]) -> Tensor:
    """Returns a matrix in fp32 from its parts; what the format's arithmetic gives, unrounded."""
    numbers, scales = (parts[p.ending] for p in layout.parts[:2])
    if layout.name == "block_fp8":
        return dequantize_blocks(numbers, scales.float(), torch.float32)
    if layout.name == "int4_g32":
        return int4.dequantize(numbers, scales)
    if layout.name == "mxfp4_blocks":
        numbers = numbers.flatten(-2)
    return mx.dequantize_e2m1(numbers, scales.view(torch.uint8))


def check_finite(x: Tensor, name: str, file: str = "") -> Tensor:
    """Returns x.

    Raises:
        InputError: it holds a number that is infinite or none.
    """
    if not torch.isfinite(x).all():
        rule = "holds numbers that are infinite or not a number"
        raise InputError(Violation(file=file, field=name, rule=rule))
    return x


def coded(
    layout: Layout | None, name: str, tensor: Tensor, rule: mx.ScaleRule
) -> Iterator[tuple[str, Tensor]]:
    """Yields a stored tensor, or what holds it in a release format that quantises it.

    Raises:
        InputError: it does not fit the format.
    """
    chosen = layout_for(layout, name, tuple(tensor.shape))
    if chosen is None:
        yield name, tensor
        return
    if chosen.stacked:
        tensor = tensor.transpose(-1, -2)
    if tensor.shape[-1] % chosen.whole_columns:
        raise InputError(
            Violation(
                field=name,
                value=str(tensor.shape[-1]),
                rule=f"{chosen.name} needs whole blocks of columns",
                limit=f"a multiple of {chosen.whole_columns}",
            )
        )
    for ending, part in encode(chosen, check_finite(tensor, name), rule).items():
        yield name.removesuffix(chosen.ending) + ending, part
