"""Where a tensor that the backward pass needs is in the meantime, and how to have it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flopwright.kernels.fp8_quantize.op import dequantize, quantize

Storage = StorageWeakRef
Watch = Callable[[Tensor], object]


def storage_of(tensor: Tensor) -> Storage:
    """Returns a weak reference to the memory under a tensor."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


class Source(Protocol):
    """Has a keeper's tensor made, or brought back."""

    def bring(self, keeper: Keeper) -> None:
        """Lets the keeper `hold` its tensor."""
        ...


class Keeper:
    """One piece of memory that the backward pass reads, shared by all who saved a view of it.

    Attributes:
        tensor: some view of it; None while it is dropped, narrow or elsewhere.
        source: where it comes from then.
        stays: whether it is narrow already, and stays where it is.
    """

    __slots__ = ("__weakref__", "_watched", "source", "stays", "tensor")

    def __init__(self, source: Source | None = None) -> None:
        self.tensor: Tensor | None = None
        self.source = source
        self.stays = False
        self._watched: object = None

    @property
    def plain(self) -> bool:
        """Whether the tensor is kept as it is, and may move."""
        return self.tensor is not None and self.source is None and not self.stays

    def kept(self, tensor: Tensor) -> None:
        """Hears that an operator or a region keeps `tensor`."""

    def hold(self, tensor: Tensor, watch: Watch | None = None) -> None:
        """Holds a tensor that is outside of any graph."""
        self.tensor, self.source = tensor, None
        self._watched = None if watch is None else watch(tensor)

    def leave(self, source: Source) -> None:
        """Lets the tensor go; `source` has it from now on."""
        self.tensor, self.source, self._watched = None, source, None

    def get(self) -> Tensor:
        """Returns the tensor."""
        if self.tensor is None:
            assert self.source is not None, "nobody has the tensor"
            self.source.bring(self)
        assert self.tensor is not None
        return self.tensor


class Narrowed(Keeper):
    """Keeps FP8 numbers and their scales in place of the tensor."""

    __slots__ = ("_dtype", "_parts", "_watch")

    def __init__(self, watch: Watch | None) -> None:
        super().__init__()
        self._parts: tuple[Tensor, Tensor] | None = None
        self._dtype = torch.float32
        self._watch = watch

    @property
    def plain(self) -> bool:
        """Never: what is narrow already stays where it is."""
        return False

    def kept(self, tensor: Tensor) -> None:
        """Narrows the tensor the first time it is kept."""
        if self._parts is None:
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            assert whole, "only whole memory is narrowed"
            assert tensor.is_contiguous()
            with torch.no_grad():
                self._parts, self._dtype = quantize(tensor.detach()), tensor.dtype
            if self._watch is not None:
                self._watched = tuple(map(self._watch, self._parts))

    def get(self) -> Tensor:
        """Returns the tensor within the format's error, made wide for the one who asks."""
        assert self._parts is not None
        with torch.no_grad():
            wide: Tensor = dequantize(*self._parts, self._dtype)
        return wide


class Cell:
    """A saved tensor: a view of what a keeper has."""

    __slots__ = ("_keeper", "_offset", "_size", "_stride", "requires_grad")

    def __init__(self, keeper: Keeper, tensor: Tensor) -> None:
        self._keeper = keeper
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self.requires_grad = tensor.requires_grad

    @classmethod
    def of(cls, keeper: Keeper, tensor: Tensor) -> Cell:
        """Returns the cell of `tensor`, whose memory `keeper` has."""
        assert keeper.tensor is None or keeper.tensor.dtype == tensor.dtype
        return cls(keeper, tensor)

    def get(self) -> Tensor:
        """Returns the tensor, made again or brought back where need be."""
        held = self._keeper.get()
        shape = (held.size(), held.stride(), held.storage_offset())
        if shape == (self._size, self._stride, self._offset):
            return held
        return held.as_strided(self._size, self._stride, self._offset)
