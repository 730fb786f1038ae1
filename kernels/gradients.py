"""A backward pass in two halves: gradients of activations now, those of weights later.

Zero-bubble pipelines (arXiv 2401.10241) send the gradient of a chunk's input on its way
first and fill waiting times with the gradients of weights. An op with a weight of some size
therefore hands that gradient's computation to `weight_gradient`, which does it at once or,
inside `deferring()`, notes it down. Everything else that the forward pass saved is let go
with the first half; only what the noted computations hold stays.

Norms compute both gradients in one kernel, and theirs are not put off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

Keep = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class _Gradient:
    """A gradient still to be made.

    Attributes:
        edge: where in the graph it goes on.
        kept: what an observer returned for the tensors; lives as long as they do.
    """

    edge: GradientEdge
    compute: Callable[..., Tensor]
    tensors: tuple[Tensor, ...]
    kept: tuple[Any, ...]


@dataclass(slots=True)
class OwedGradients:
    """The weight gradients that the first half of a backward pass put off."""

    _owed: deque[_Gradient] = field(default_factory=deque)

    def add(
        self, edge: GradientEdge, compute: Callable[..., Tensor], tensors: tuple[Tensor, ...]
    ) -> None:
        """Notes a computation, what it needs, and where its result goes on."""
        kept = () if _observer is None else tuple(map(_observer, tensors))
        self._owed.append(_Gradient(edge, compute, tensors, kept))

    def pay(self) -> None:
        """Computes and accumulates them one by one, in the order of the backward pass."""
        while self._owed:
            owed = self._owed.popleft()
            torch.autograd.backward((owed.edge,), (owed.compute(*owed.tensors),))


# Not a thread's own: GPUs' backward passes run in autograd's threads.
_owed: OwedGradients | None = None
_observer: Keep | None = None


@contextmanager
def deferring() -> Iterator[OwedGradients]:
    """Puts off weight gradients inside; one backward pass runs at a time."""
    global _owed
    before, _owed = _owed, OwedGradients()
    try:
        yield _owed
    finally:
        _owed = before


@contextmanager
def observing(keep: Keep) -> Iterator[None]:
    """Calls `keep` with each tensor that is kept for later inside, and holds what it returns.

    The counterpart of torch's saved_tensors_hooks for what the second half needs.
    """
    global _observer
    before, _observer = _observer, keep
    try:
        yield
    finally:
        _observer = before


def weight_gradient(
    ctx: Any, index: int, compute: Callable[..., Tensor], *tensors: Tensor
) -> Tensor | None:
    """Returns a weight's gradient, or None where the running backward pass puts it off.

    Args:
        ctx: of the op's backward.
        index: the weight's place among the op's tensor inputs.
        compute: makes the gradient of `tensors`, and must hold no others.
    """
    if _owed is None:
        return compute(*tensors)
    _owed.add(GradientEdge(*ctx.next_functions[index]), compute, tensors)
    return None
