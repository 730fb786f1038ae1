"""Bytes of released weights: how many bits a weight takes in each storage format."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import ParamTensor, Role, parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """One storage format: element bits and one scale a block.

    Attributes:
        bits: bits of one element.
        scale_bits: bits of one scale, 0 for a format without scales.
        block: (rows, columns) of weights that share a scale.
        roles: the parameter roles that releases store in this format; the rest is bf16.
        source: where the layout is described.
    """

    name: str
    bits: int
    scale_bits: int = 0
    block: tuple[int, int] = (1, 1)
    roles: frozenset[Role] = frozenset()
    source: str

    @property
    def bits_per_weight(self) -> float:
        """Bits a weight costs with its share of the scale, whole blocks."""
        return self.bits + self.scale_bits / math.prod(self.block)

    def tensor_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a (..., rows, columns) tensor; edge blocks have a scale too."""
        *stack, rows, columns = shape
        scales = -(-rows // self.block[0]) * -(-columns // self.block[1])
        bits = math.prod(shape) * self.bits + math.prod(stack) * scales * self.scale_bits
        return -(-bits // 8)


BF16: Final = WeightFormat(name="bf16", bits=16, source="IEEE float32 cut to 16 bits")
BLOCK_FP8: Final = WeightFormat(
    name="block_fp8",
    bits=8,
    scale_bits=32,
    block=(128, 128),
    roles=frozenset({"attention", "mlp", "expert", "shared_expert"}),
    source="DeepSeek-V3 README_WEIGHTS: E4M3, fp32 scale_inv a 128x128 block",
)
INT4_G32: Final = WeightFormat(
    name="int4_g32",
    bits=4,
    scale_bits=16,
    block=(1, 32),
    roles=frozenset({"expert"}),
    source="Kimi-K2-Thinking config: compressed-tensors pack-quantized, group 32, bf16 scale",
)
MXFP4: Final = WeightFormat(
    name="mxfp4",
    bits=4,
    scale_bits=8,
    block=(1, 32),
    roles=frozenset({"expert"}),
    source="OCP Microscaling Formats 1.0: E2M1 elements, E8M0 scale a block of 32",
)
NVFP4: Final = WeightFormat(
    name="nvfp4",
    bits=4,
    scale_bits=8,
    block=(1, 16),
    roles=frozenset({"expert"}),
    source="NVIDIA NVFP4: E2M1 elements, E4M3 scale a block of 16",
)


def _stored_bytes(param: ParamTensor, weight_format: WeightFormat) -> int:
    if param.tied:
        return 0
    matrix = len(param.shape) >= 2 and not param.is_bias
    if param.role in weight_format.roles and matrix:
        return weight_format.tensor_bytes(param.shape)
    return param.numel * BF16.bits // 8


def release_bytes(spec: ModelSpec, weight_format: WeightFormat) -> int:
    """Returns the bytes of a checkpoint whose eligible matrices are in `weight_format`."""
    return sum(_stored_bytes(p, weight_format) for p in parameters(spec))


def mixed_bytes(quantised: int, weight_format: WeightFormat, others: int) -> int:
    """Returns the bytes of `quantised` weights in the format and `others` in bf16.

    For models of which only the counts are public.
    """
    return round(quantised * weight_format.bits_per_weight / 8) + others * BF16.bits // 8
