"""Bytes of tensors by class on this rank, counted by storage: what both interpreters can count.

Activations are what autograd keeps for the backward pass: `saved_tensors_hooks` see every
saved tensor when it is kept and when it is let go, over one step that is not timed. What the
weight gradients of a split backward pass wait for counts with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flopwright.executor.measure.expert_rows import ExpertRows, announcing
from flopwright.kernels.gradients import observing


@dataclass(slots=True)
class SavedBytes:
    """Counts live saved storages, each once, and remembers the peak.

    Attributes:
        excluded: addresses of storages that are not activations (parameters, buffers). With
            any, no parameter is one: addresses of gathered weights come and go.
        rows: of experts; `peak_rows` is their share of even rows when the peak was reached.
    """

    excluded: frozenset[int]
    live_bytes: int = 0
    peak_bytes: int = 0
    rows: ExpertRows = field(default_factory=ExpertRows)
    peak_rows: float = 1.0
    _uses: dict[int, int] = field(default_factory=dict)

    def keep(self, tensor: Tensor) -> _Kept:
        """Counts a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if nbytes == 0 or address in self.excluded or (self.excluded and _is_weight(tensor)):
            return _Kept(tensor, None, 0, 0)
        uses = self._uses.get(address, 0)
        self._uses[address] = uses + 1
        if uses == 0:
            self.live_bytes += nbytes
            self.rows.keep(address)
            if self.live_bytes > self.peak_bytes:
                self.peak_bytes, self.peak_rows = self.live_bytes, self.rows.share()
        return _Kept(tensor, self, address, nbytes)

    def release(self, address: int, nbytes: int) -> None:
        """Counts a tensor that autograd lets go."""
        self._uses[address] -= 1
        if self._uses[address] == 0:
            del self._uses[address]
            self.live_bytes -= nbytes
            self.rows.release(address)


class _Kept:
    """What the hooks store in a tensor's place; its end is the end of the saved tensor."""

    __slots__ = ("_address", "_meter", "_nbytes", "tensor")

    def __init__(
        self, tensor: Tensor, meter: SavedBytes | None, address: int, nbytes: int
    ) -> None:
        self.tensor = tensor
        self._meter, self._address, self._nbytes = meter, address, nbytes

    def __del__(self) -> None:
        if self._meter is not None:
            self._meter.release(self._address, self._nbytes)


@contextmanager
def saved_bytes(modules: Iterable[nn.Module]) -> Iterator[SavedBytes]:
    """Meters what autograd saves inside, the modules' parameters and buffers left out."""
    chosen = tuple(modules)
    meter = SavedBytes(frozenset(_addresses(chosen)))
    hooks = torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda kept: kept.tensor)
    with hooks, observing(meter.keep), announcing(chosen, meter.rows):
        yield meter


def _addresses(modules: Iterable[nn.Module]) -> Iterator[int]:
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            yield held.untyped_storage().data_ptr()


def _is_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def buffer_bytes(modules: Iterable[nn.Module]) -> int:
    """Returns the bytes of all buffers, each storage once."""
    buffers = [b.untyped_storage() for module in modules for b in module.buffers()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in buffers}.values())


def weight_bytes(modules: Iterable[nn.Module]) -> int:
    """Returns the bytes of all parameters and buffers, each storage once."""
    storages = {}
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def fullest_by_stage(
    ranks: Iterable[tuple[int, dict[str, int]]], num_stages: int
) -> tuple[dict[str, int], ...]:
    """Returns for each pipeline stage the classes of its fullest rank.

    Args:
        ranks: (stage, bytes by class) of every rank.
        num_stages: pipeline stages.
    """
    fullest: list[dict[str, int]] = [{} for _ in range(num_stages)]
    for stage, classes in ranks:
        if sum(classes.values()) > sum(fullest[stage].values()):
            fullest[stage] = classes
    return tuple(fullest)
