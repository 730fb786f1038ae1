"""What attention keeps of the tokens seen, so that a new token costs one token's work.

GQA keeps rotated keys and values; under a sliding window the last `sliding_window` of them.
MLA keeps the normalised latent and the shared rotated key (with an indexer its key too), KDA
a state of fixed size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flopwright.kernels.linear.reference import wide_dtype
from flopwright.spec.model import KdaAttention, MlaAttention, ModelSpec


class LayerCache:
    """The positions that one layer keeps, in order, in tensors [batch, room, ...]."""

    def __init__(
        self,
        shapes: Iterable[tuple[int, ...]],
        batch: int,
        room: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.tensors = tuple(
            torch.empty(batch, room, *shape, dtype=dtype, device=device) for shape in shapes
        )
        self.held = 0

    @property
    def room(self) -> int:
        """Positions that fit; more push the oldest out."""
        return self.tensors[0].shape[1]

    def extend(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Keeps new positions; returns what was held and the new ones together, in order.

        Args:
            new: one tensor [batch, new positions, ...] for each of `tensors`.
        """
        end = self.held + new[0].shape[1]
        if end <= self.room:
            for kept, more in zip(self.tensors, new, strict=True):
                kept[:, self.held : end] = more
            self.held = end
            return tuple(kept[:, :end] for kept in self.tensors)
        whole = tuple(
            torch.cat((kept[:, : self.held], more), 1)
            for kept, more in zip(self.tensors, new, strict=True)
        )
        for kept, everything in zip(self.tensors, whole, strict=True):
            kept.copy_(everything[:, -self.room :])
        self.held = self.room
        return whole


class StateCache:
    """What linear attention keeps: its state, and the last inputs of its convolutions.

    Attributes:
        state: [batch, heads, K, K], at least fp32.
        tensors: it, and the inputs [batch, taps - 1, heads * K] of q, k and v.
    """

    def __init__(
        self, spec: KdaAttention, batch: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        width, taps = spec.head_dim, spec.conv_kernel
        shape = (batch, spec.num_heads, width, width)
        self.state = torch.zeros(shape, dtype=wide_dtype(dtype), device=device)
        self._before = tuple(
            torch.zeros(batch, taps - 1, spec.inner_size, dtype=dtype, device=device)
            for _ in range(3)
        )
        self.tensors = (self.state, *self._before)

    def shift(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Keeps the last inputs of q, k and v; returns those that stood before.

        Args:
            new: each [batch, positions, heads * K].
        """
        before = tuple(kept.clone() for kept in self._before)
        for kept, old, more in zip(self._before, before, new, strict=True):
            kept.copy_(torch.cat((old, more), 1)[:, more.shape[1] :])
        return before


@dataclass(slots=True)
class KvCache:
    """The caches of a stage's layers, by layer number.

    Attributes:
        capacity: positions that a sequence may have.
        positions: positions seen so far; the next token stands at this one.
    """

    capacity: int
    layers: dict[int, LayerCache | StateCache]
    positions: int = field(default=0)

    def nbytes(self) -> int:
        """Returns the bytes of all cache tensors, used or not."""
        return sum(t.nbytes for layer in self.layers.values() for t in layer.tensors)

    def advance(self, count: int) -> int:
        """Counts `count` new positions; returns where the first of them stands."""
        start = self.positions
        assert start + count <= self.capacity, "the cache was made for fewer positions"
        self.positions += count
        return start


def make_cache(
    spec: ModelSpec,
    layers: Iterable[int],
    batch: int,
    capacity: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> KvCache:
    """Returns an empty cache for sequences of at most `capacity` positions.

    Args:
        layers: layer numbers; the embeddings and the head keep nothing.
    """
    attn, place = spec.attention, torch.device(device)
    if isinstance(attn, MlaAttention):
        shapes: list[tuple[int, ...]] = [(attn.kv_lora_rank,), (attn.qk_rope_head_dim,)]
        shapes += [(attn.indexer.head_dim,)] if attn.indexer is not None else []
    else:
        shapes = [(attn.num_kv_heads, attn.head_dim)] * 2

    def made(number: int) -> LayerCache | StateCache:
        own = spec.attention_of(number)
        if isinstance(own, KdaAttention):
            return StateCache(own, batch, dtype=dtype, device=place)
        room = min(capacity, spec.sliding_window(number) or capacity)
        return LayerCache(shapes, batch, room, dtype=dtype, device=place)

    inner = (n for n in layers if 0 <= n < spec.num_layers)
    return KvCache(capacity=capacity, layers={n: made(n) for n in inner})
