"""Copies of activations to host memory in a dry run: both ends are fake, the device's counts.

They last as long as on a GPU, where a micro-batch's tensors stay until the compute has waited
for their copies (executor/parallel/copies.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from flopwright.executor.dry.memory import StorageMeter


@dataclass(slots=True)
class HostCopies:
    """Copies that are done once the compute has waited for them."""

    meter: StorageMeter
    _leaving: list[Tensor] = field(default_factory=list)
    _left: deque[list[Tensor]] = field(default_factory=deque)

    def out(self, tensor: Tensor) -> Tensor:
        """Returns the copy in host memory; the tensor stays until its micro-batch has left."""
        with self.meter.paused():
            host = tensor.clone()
        self._leaving.append(tensor)
        return host

    def left(self) -> None:
        """Marks the end of a micro-batch's copies to the host."""
        self._left.append(self._leaving)
        self._leaving = []

    def make_room(self) -> None:
        """Waits until at most one micro-batch's copies still run."""
        self._wait(1)

    def back(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Returns a copy on the device; everything that leaves has left by then."""
        self._wait(0)
        return host.clone(), _nothing

    def _wait(self, still_running: int) -> None:
        while len(self._left) > still_running:
            self._left.popleft()


def _nothing() -> None:
    """Waits for nothing."""
