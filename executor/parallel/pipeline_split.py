"""The backward pass of a chunk in one piece or in two: input gradients now, weights' later.

Zero-bubble schedules (arXiv 2401.10241) send the gradient of a chunk's input on its way
first and fill waiting times with the gradients of weights. A weight's gradient needs what
its op saved and the gradient that arrived at the op's output. So the first half stops at
every op that uses a weight, keeps what arrived there (`GradientEdge`), and goes on through
the op to its input; the second half runs those ops once more, each for its weight alone.
kernels/gradients.py tells them which half it is, so that neither does the other's work.

What the forward pass saved stays until the second half is done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from flopwright.kernels.gradients import Wanted, computing_only


@dataclass(frozen=True, slots=True)
class WeightUse:
    """An op of the graph that uses weights: its outputs, and the weights."""

    edges: tuple[GradientEdge, ...]
    weights: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Owed:
    """The weight gradients of one micro-batch that the first half left.

    Attributes:
        arrived: gradients at the outputs of each use; None where none arrived.
    """

    uses: tuple[WeightUse, ...]
    arrived: tuple[tuple[Tensor | None, ...], ...]

    def pay(self) -> None:
        """Accumulates the weights' gradients: the second half of the backward pass."""
        with computing_only(Wanted.WEIGHT):
            for use, gradients in zip(self.uses, self.arrived, strict=True):
                pairs = [
                    (e, g) for e, g in zip(use.edges, gradients, strict=True) if g is not None
                ]
                if pairs:
                    edges, values = zip(*pairs, strict=True)
                    torch.autograd.backward(edges, values, inputs=use.weights)


def backward(edge: GradientEdge, gradient: Tensor) -> None:
    """Accumulates the gradients of everything below `edge`, given its own."""
    torch.autograd.backward((edge,), (gradient,))


def backward_input(
    edge: GradientEdge, gradient: Tensor, source: Tensor | None, weights: Iterable[nn.Parameter]
) -> Owed:
    """Runs the first half: sets `source.grad`, returns what is owed to the weights.

    A weight that the chunk uses twice (an embedding tied to the head beside it) cannot be
    left for later, because the way from one use leads through the other: the whole backward
    pass is then done at once, and nothing is owed.

    Args:
        edge: output of the chunk, or its loss.
        source: input of the chunk; None where it is the first one, whose input is tokens.
        weights: the chunk's trainable parameters.
    """
    uses = tuple(weight_uses(edge, {id(w) for w in weights}))
    met = [id(w) for use in uses for w in use.weights]
    if len(set(met)) < len(met):
        backward(edge, gradient)
        return Owed((), ())
    outputs = [e for use in uses for e in use.edges]
    inputs: list[Any] = outputs if source is None else [source, *outputs]
    with computing_only(Wanted.INPUT):
        found = torch.autograd.grad(
            (edge,), inputs, (gradient,), retain_graph=True, allow_unused=True
        )
    if source is not None:
        source.grad, found = found[0], found[1:]
    gradients = iter(found)
    return Owed(uses, tuple(tuple(next(gradients) for _ in use.edges) for use in uses))


def weight_uses(edge: GradientEdge, weights: set[int]) -> Iterator[WeightUse]:
    """Yields each op below `edge` that takes one of the weights (by id) as it is."""
    todo, seen = [edge.node], {edge.node}
    while todo:
        node: Any = todo.pop()
        own = []
        for child, _ in node.next_functions:
            if child is None:
                continue
            weight = getattr(child, "variable", None)  # of nodes that accumulate a gradient
            if weight is not None:
                if id(weight) in weights:
                    own.append(weight)
            elif child not in seen:
                seen.add(child)
                todo.append(child)
        if own:
            edges = tuple(GradientEdge(node, i) for i in range(_num_outputs(node)))
            yield WeightUse(edges, tuple(own))


def _num_outputs(node: Any) -> int:
    return len(node._input_metadata)
