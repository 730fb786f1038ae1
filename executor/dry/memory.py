"""Bytes of a dry step by memory class: every storage from its first operator to its end."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(slots=True)
class Boundary:
    """What stood between two actions of the list, and the fullest moment before."""

    action: str
    live_bytes: int
    peak_bytes: int


@dataclass(slots=True)
class StorageMeter:
    """Counts storages that operators return, each once, until nothing holds them.

    Storages on the "meta" device have no bytes even in a real run, and host memory is
    another's: both are left out.

    Attributes:
        device: the type of device whose memory is counted.
        live_bytes: now; peak_bytes: the fullest moment since the last boundary.
        boundaries: one where the list begins, then one behind each action.
        look_at: at so many boundaries, `looked` is set to what `born` returns.
    """

    device: str
    live_bytes: int = 0
    peak_bytes: int = 0
    boundaries: list[Boundary] = field(default_factory=list)
    look_at: int = -1
    looked: list[tuple[int, int]] = field(default_factory=list)
    _live: dict[int, tuple[int, int, weakref.ref[Any]]] = field(default_factory=dict)

    def see(self, tensor: Tensor) -> None:
        """Counts the tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live:
            return
        nbytes = storage.nbytes()
        if nbytes == 0 or not self._counted(tensor):
            return
        reference = weakref.ref(storage, lambda _, a=address: self._forget(a))  # type: ignore[misc]
        self._live[address] = (nbytes, len(self.boundaries), reference)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is made inside is not counted, as it stands in another memory."""
        device, self.device = self.device, ""
        try:
            yield
        finally:
            self.device = device

    def _counted(self, tensor: Tensor) -> bool:
        return type(tensor) is FakeTensor and tensor.fake_device.type == self.device

    def _forget(self, address: int) -> None:
        self.live_bytes -= self._live.pop(address)[0]

    def start(self) -> None:
        """Begins a step: what stands now was there before it."""
        self.boundaries.clear()
        self._live = {a: (n, -1, r) for a, (n, _, r) in self._live.items()}
        self.peak_bytes = self.live_bytes

    def boundary(self, action: str) -> None:
        """Notes what stands behind an action ("": before the first one)."""
        self.boundaries.append(Boundary(action, self.live_bytes, self.peak_bytes))
        self.peak_bytes = self.live_bytes
        if len(self.boundaries) == self.look_at:
            self.looked = self.born()

    def of(self, tensors: Iterable[Tensor]) -> int:
        """Returns the bytes of the tensors' storages, each counted once."""
        addresses = {t.untyped_storage()._cdata for t in tensors}
        return sum(self._live[a][0] for a in addresses if a in self._live)

    def born(self) -> list[tuple[int, int]]:
        """Returns (bytes, boundaries before it) of every live storage made since `start`.

        Those with no boundary before them are what the step was given.
        """
        return [(nbytes, when) for nbytes, when, _ in self._live.values() if when >= 0]


def memory_by_class(
    standing: dict[str, int],
    boundaries: Sequence[Boundary],
    looked: Sequence[tuple[int, int]],
    resting: Sequence[bool],
) -> tuple[dict[str, int], int]:
    """Returns (bytes by memory class, the fullest moment) of a step, its input left out.

    Gradients are what was made in the step and stands once all micro-batches are done.
    Activations are what stands between two actions beside them and the states, where no
    message waits to be sent or used; temporaries what the fullest moment has beyond all of
    these. Constant tables are left out: all steps share them.

    Args:
        standing: bytes before the step, "weights", "optimizer_state" and "constants".
        looked: (bytes, boundaries before it) of what stood before the first reduction.
        resting: by boundary, whether no message waits there.
    """
    before = sum(standing.values())
    given = sum(n for n, when in looked if when == 0)
    gradients = [(n, when) for n, when in looked if when > 0]
    made = [0] * (len(boundaries) + 1)
    for nbytes, when in gradients:
        made[when] += nbytes
    held = grown = 0
    for i, boundary in enumerate(boundaries):
        grown += made[i]
        if resting[i]:
            held = max(held, boundary.live_bytes - before - given - grown)
    peak = max(b.peak_bytes for b in boundaries) - given - standing["constants"]
    found = {
        "weights": standing["weights"],
        "gradients": sum(n for n, _ in gradients),
        "optimizer_state": standing["optimizer_state"],
        "activations": held,
    }
    return {**found, "temporaries": max(0, peak - sum(found.values()))}, peak
