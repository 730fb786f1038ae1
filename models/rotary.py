"""Angle tables of rotary embedding: made once for each device, precision and length."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype
from flopwright.kernels.rope.frequencies import inverse_frequencies, table_scale
from flopwright.models.documents import Documents, Start
from flopwright.models.parallel import ContextParallel
from flopwright.models.saving import stands
from flopwright.spec.model import Rope


class RotaryTable:
    """cos and sin of every position and pair, at least fp32 whatever the model's dtype.

    Where ranks cut sequences between them, of the positions that this rank holds.

    Not a buffer: casting the model to bf16 must not round the angles, and the tables are
    derived, so a checkpoint has no use for them. All layers of a stage share one.
    """

    def __init__(
        self, rope: Rope | None, width: int, context: ContextParallel | None = None
    ) -> None:
        self._context = context if context is not None and context.size > 1 else None
        # Without positions every angle is 0, which turns nothing.
        self._frequencies = (
            np.zeros(width // 2) if rope is None else inverse_frequencies(rope, width)
        )
        self._scale = 1.0 if rope is None else table_scale(rope.scaling)
        self._tables: dict[tuple[torch.device, torch.dtype, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, seq_len: int, like: Tensor, start: Start = 0) -> tuple[Tensor, Tensor]:
        """Returns (cos, sin), each [seq_len, width / 2], from position `start` on.

        On `like`'s device, in its dtype or fp32; of documents at each token's own position.
        """
        if isinstance(start, Documents):
            if self not in start.angles:
                cos, sin = self._tables_for(start.longest, like, 0)
                start.angles[self] = cos[start.positions], sin[start.positions]
            cos, sin = start.angles[self]
        else:
            cos, sin = self._tables_for(seq_len, like, start)
        return stands(cos), stands(sin)

    def _tables_for(self, seq_len: int, like: Tensor, start: int) -> tuple[Tensor, Tensor]:
        dtype = wide_dtype(like.dtype)
        if self._context is not None:
            assert start == 0
            key = (like.device, dtype, seq_len)
            if key not in self._tables:
                positions = self._context.positions(seq_len, torch.device("cpu"))
                self._tables[key] = self._angles(positions, dtype, like.device)
            return self._tables[key]
        end, key = start + seq_len, (like.device, dtype, 0)
        if key not in self._tables or self._tables[key][0].shape[0] < end:
            # Room to the next power of two: generation lengthens its input by one each time.
            positions = torch.arange(1 << (end - 1).bit_length())
            self._tables[key] = self._angles(positions, dtype, like.device)
        cos, sin = self._tables[key]
        return cos[start:end], sin[start:end]

    def _angles(
        self, positions: Tensor, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        angles = positions.double().outer(torch.from_numpy(self._frequencies))
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return cos.to(dtype).to(device), sin.to(dtype).to(device)

    def tables(self) -> list[Tensor]:
        """Returns the tables made so far."""
        return [t for pair in self._tables.values() for t in pair]
