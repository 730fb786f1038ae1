"""How a chunk's input enters the graph of its forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class _Entry(torch.autograd.Function):
    """A chunk's input: nothing but the operators that save it holds its memory."""

    @staticmethod
    def forward(
        ctx: Any, received: Tensor, anchor: Tensor, sink: Callable[[Tensor], None]
    ) -> Tensor:
        """Returns the input as part of a graph that begins at `anchor`."""
        ctx.sink = sink
        return received.view_as(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        """Hands the gradient to the sink."""
        ctx.sink(grad)
        return None, None, None


def entered(received: Tensor, sink: Callable[[Tensor], None]) -> Tensor:
    """Returns a chunk's input to feed in; its gradient is handed to `sink`, once.

    A leaf that requires gradients would be held by the graph whatever becomes of what the
    operators saved.
    """
    anchor = torch.empty((), dtype=received.dtype, device=received.device, requires_grad=True)
    out: Tensor = _Entry.apply(received, anchor, sink)  # type: ignore[no-untyped-call]
    return out
