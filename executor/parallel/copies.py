"""Copies of saved tensors to host memory and back: beside the compute on GPUs, plain on CPUs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

# Micro-batches whose tensors may still stand on the GPU while their copies run: those of the
# last two OFFLOADs, as the simulated step has it.
_PLACES = 2


class Copies(Protocol):
    """Moves flat tensors."""

    def out(self, tensor: Tensor) -> Tensor:
        """Returns a copy in host memory that is ready once `left` micro-batches are."""
        ...

    def left(self) -> None:
        """Marks the end of a micro-batch's copies to the host."""
        ...

    def make_room(self) -> None:
        """Lets the compute wait until at most one micro-batch's copies still run."""
        ...

    def back(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Returns a tensor that the copy arrives in, and what makes the compute wait for it."""
        ...


def copies_for(device: torch.device) -> Copies:
    """Returns the copies of a device."""
    return StreamCopies(device) if device.type == "cuda" else PlainCopies(device)


@dataclass(frozen=True, slots=True)
class PlainCopies:
    """Copies done at once, where they stand."""

    device: torch.device

    def out(self, tensor: Tensor) -> Tensor:
        """Returns a copy."""
        return tensor.clone()

    def left(self) -> None:
        """Has nothing to mark."""

    def make_room(self) -> None:
        """Has nothing to wait for."""

    def back(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Returns another copy."""
        return host.clone(), _nothing


@dataclass(slots=True)
class StreamCopies:
    """Copies on a stream of their own for each direction, through pinned memory.

    What leaves is held until the compute stream has waited for its copy, so that its memory
    is taken again only by work that stands behind the copy.
    """

    device: torch.device
    _out: Any = field(init=False)
    _in: Any = field(init=False)
    _leaving: list[Tensor] = field(default_factory=list)
    _left: deque[tuple[Any, list[Tensor]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._out, self._in = _stream(self.device), _stream(self.device)

    def out(self, tensor: Tensor) -> Tensor:
        """Returns pinned memory that the copy arrives in."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        if not self._leaving:
            self._out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._out):
            host.copy_(tensor, non_blocking=True)
        self._leaving.append(tensor)
        return host

    def left(self) -> None:
        """Marks the end of a micro-batch's copies to the host."""
        self._left.append((self._out.record_event(), self._leaving))
        self._leaving = []

    def make_room(self) -> None:
        """Lets the compute wait for all copies but those of the last micro-batch that left."""
        self._wait(_PLACES - 1)

    def back(self, host: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Returns memory of the compute stream that the copy arrives in."""
        compute = torch.cuda.current_stream(self.device)
        self._wait(0)
        tensor = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        self._in.wait_stream(compute)
        with torch.cuda.stream(self._in):
            tensor.copy_(host, non_blocking=True)
        arrived = self._in.record_event()
        return tensor, lambda: torch.cuda.current_stream(self.device).wait_event(arrived)

    def _wait(self, still_running: int) -> None:
        while len(self._left) > still_running:
            done, _tensors = self._left.popleft()
            torch.cuda.current_stream(self.device).wait_event(done)


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _nothing() -> None:
    """Waits for nothing."""
