"""Angle tables of rotary embedding: made once for each device, precision and length."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.rope.frequencies import inverse_frequencies, table_scale
from flopwright.spec.model import Rope


class RotaryTable:
    """cos and sin of every position and pair, at least fp32 whatever the model's dtype.

    Not a buffer: casting the model to bf16 must not round the angles, and the tables are
    derived, so a checkpoint has no use for them. All layers of a stage share one.
    """

    def __init__(self, rope: Rope, width: int) -> None:
        self._frequencies = inverse_frequencies(rope, width)
        self._scale = table_scale(rope.scaling)
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, seq_len: int, like: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [seq_len, width / 2], from position `start` on.

        On `like`'s device, in its dtype or fp32.
        """
        end = start + seq_len
        key = (like.device, wide_dtype(like.dtype))
        if key not in self._tables or self._tables[key][0].shape[0] < end:
            # Room to the next power of two: generation lengthens its input by one each time.
            rows = 1 << (end - 1).bit_length()
            positions = torch.arange(rows, dtype=torch.float64)
            angles = positions.outer(torch.from_numpy(self._frequencies))
            self._tables[key] = (
                (angles.cos() * self._scale).to(key[1]).to(key[0]),
                (angles.sin() * self._scale).to(key[1]).to(key[0]),
            )
        cos, sin = self._tables[key]
        return cos[start:end], sin[start:end]

    def tables(self) -> list[Tensor]:
        """Returns the tables made so far."""
        return [t for pair in self._tables.values() for t in pair]
