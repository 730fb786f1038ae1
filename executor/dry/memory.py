"""Bytes of a dry step by memory class: every storage from its first operator to its end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from flopwright.plan.schedules.actions import COMPUTE_KINDS, Action, ActionKind

_RECEIVES: Final = frozenset({ActionKind.RECV_FORWARD, ActionKind.RECV_BACKWARD})
_MOVES: Final = frozenset(
    {ActionKind.GATHER_WEIGHTS, ActionKind.REDUCE_GRADIENTS, ActionKind.OPTIMIZER_STEP}
)
_SENDS: Final = frozenset({ActionKind.SEND_FORWARD, ActionKind.SEND_BACKWARD})


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
        look_at: at so many boundaries, `looked` is set to what `born` returns, and
            `weight_bytes` to those of the tensors that `weights` gives.
    """

    device: str
    live_bytes: int = 0
    peak_bytes: int = 0
    boundaries: list[Boundary] = field(default_factory=list)
    look_at: int = -1
    looked: list[tuple[int, int]] = field(default_factory=list)
    weights: Callable[[], Iterable[Tensor]] = tuple
    weight_bytes: int = 0
    _live: dict[int, tuple[int, int, weakref.ref[Any]]] = field(default_factory=dict)

    def see(self, tensor: Tensor) -> None:
        """Counts the tensor's storage if it is new."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self._live:
            return
        if storage.nbytes() and self._counted(tensor):
            self._add(storage, address)

    def _add(self, storage: torch.UntypedStorage, address: int) -> None:
        nbytes = storage.nbytes()
        reference = weakref.ref(storage, lambda _, a=address: self._forget(a))  # type: ignore[misc]
        self._live[address] = (nbytes, len(self.boundaries), reference)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes = self.live_bytes

    @contextmanager
    def watching_resizes(self) -> Iterator[None]:
        """Counts what storages become that are resized in place, as FSDP2 does with weights."""
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
            out = plain(storage, nbytes)
            address = storage._cdata
            if address in self._live:
                self._forget(address)
            if nbytes:
                self._add(storage, address)
            return out

        torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = plain  # type: ignore[method-assign]

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
            self.looked, self.weight_bytes = self.born(), self.of(self.weights())

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
    gathered: int,
    actions: Sequence[Action],
) -> tuple[dict[str, int], int]:
    """Returns (bytes by memory class, the fullest moment) of a step, its input left out.

    Gradients are what was made in the step and stands once all micro-batches are done.
    Activations are what stands between two actions beside them and the states, where no
    message waits to be sent or used; temporaries what the fullest moment has beyond all of
    these. Constant tables are left out: all steps share them.

    Args:
        standing: bytes before the step, "weights", "optimizer_state" and "constants".
        looked: (bytes, boundaries before it) of what stood before the first reduction.
        gathered: bytes of that which are weights, gathered for the step.
        actions: the list, one for each boundary but the first.
    """
    before = sum(standing.values())
    given = sum(n for n, when in looked if when == 0)
    states = [(n, when) for n, when in looked if when > 0]
    resting = _resting(actions)
    made = [0] * (len(boundaries) + 1)
    for nbytes, when in states:
        made[when] += nbytes
    held = grown = 0
    for i, boundary in enumerate(boundaries):
        grown += made[i]
        if resting[i]:
            held = max(held, boundary.live_bytes - before - given - grown)
    peak = max(b.peak_bytes for b in boundaries) - given - standing["constants"]
    found = {
        "weights": standing["weights"] + gathered,
        "gradients": sum(n for n, _ in states) - gathered,
        "optimizer_state": standing["optimizer_state"],
        "activations": held,
    }
    return {**found, "temporaries": max(0, peak - sum(found.values()))}, peak


def _resting(actions: Sequence[Action]) -> list[bool]:
    """Returns whether no message waits at the list's beginning and behind each action.

    One that has come waits for the compute that uses it, one that is to leave for its send;
    weights and gradients on their way stand twice.
    """
    found, came = [True], False
    after = [*(a.kind for a in actions[1:]), None]
    for action, then in zip(actions, after, strict=True):
        came = action.kind in _RECEIVES or (came and action.kind not in COMPUTE_KINDS)
        found.append(not came and then not in _SENDS and action.kind not in _MOVES)
    return found
