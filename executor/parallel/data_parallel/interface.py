"""What every data-parallel library must offer the training loop.

One step, whose first two calls the lowered list places (flopwright.plan.lower):

    gather_weights(chunk, micro-batch)     before compute, where weights are cut
    reduce_gradients(chunk, micro-batch)   after backwards, or once for the whole stage
    finish_gradients() -> squared_norm() -> scale_gradients(f) -> step(learning_rate)

after which every rank holds the new weights, or its part of them, and no gradients.
Gradients are sums over this rank's micro-batches (each the mean over its own tokens, over
the number of micro-batches). A gradient is averaged over the whole data- and
context-parallel size: dense ones are summed over the dp_cp group, an expert's over the ranks
that hold the same experts (its gradient already sums over the tokens of its expert group).
Both are divided by dp * cp. Tensors of which each tensor-parallel rank saw other tokens are
summed over tp too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import torch
from torch import Tensor, nn

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel.muon_cuts import Held
from flopwright.executor.parallel.groups import Group, Groups
from flopwright.models.optim.muon.layout import MatrixLayout
from flopwright.spec.workload import Optimizer, Precision

BUCKET_ELEMENTS: Final = 25_000_000
_SQUARED_AT_ONCE: Final = 2**22
Tensors = list[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """What is trained on this rank.

    Attributes:
        parameters: trainable parameters by full name, in model order.
        chunks: the modules that hold them by pipeline chunk; empty: all belong together.
        expert_names: those that are a slice of the stacked experts under ep > 1.
        tp_whole_names: those that stand whole on every tensor-parallel rank.
        tp_partial_names: those of them of which each of these ranks sees other tokens: their
            gradients are parts of a sum.
        expert_copies: how many tensor-parallel ranks send the same tokens to the experts (all of
            them without sequence parallelism): their gradients hold each token so many times.
        matrices: those that Muon orthogonalises (models/optim/muon/layout.py).
        row_factors: by what the next update multiplies rows of a tensor last (QK-Clip).
    """

    parameters: Mapping[str, nn.Parameter]
    expert_names: frozenset[str]
    groups: Groups
    optimizer: Optimizer
    precision: Precision
    timer: ActionTimer
    chunks: Mapping[int, nn.Module] = field(default_factory=dict)
    tp_whole_names: frozenset[str] = frozenset()
    tp_partial_names: frozenset[str] = frozenset()
    expert_copies: int = 1
    matrices: Mapping[str, MatrixLayout] = field(default_factory=dict)
    row_factors: dict[str, Tensor] = field(default_factory=dict)

    def is_expert(self, name: str) -> bool:
        """Whether the gradient is reduced over the expert-data-parallel group."""
        return name in self.expert_names

    def sum_group(self, name: str) -> Group:
        """Returns the data-parallel ranks over which the gradient is summed."""
        return self.groups.edp if self.is_expert(name) else self.groups.dp_cp

    def mean_over(self, *, expert: bool) -> int:
        """Returns how many ranks' tokens a gradient is the mean over: dp * cp, copies counted."""
        return self.groups.dp_cp.size * (self.expert_copies if expert else 1)

    def names_of(self, chunk: int) -> tuple[str, ...]:
        """Returns the names of a chunk's parameters, of all where the chunk is -1."""
        if chunk < 0 or not self.chunks:
            return tuple(self.parameters)
        return tuple(n for n, _ in self.chunks[chunk].named_parameters() if n in self.parameters)

    def tp_replicas(self, name: str) -> int:
        """Returns on how many tensor-parallel ranks the same elements stand."""
        return self.groups.tp.size if name in self.tp_whole_names else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePart:
    """What this rank's optimizer holds of one weight: views of what it updates.

    Attributes:
        held: which elements.
        updated: the weight's, or those of a copy of it that is updated in its place.
        state: the optimizer's, flat like `updated`, by kind (exp_avg, exp_avg_sq, or
            momentum_buffer).
        steps: the optimizer's count of steps, shape (), where it has one.
    """

    held: Held
    updated: Tensor
    state: Mapping[str, Tensor]
    steps: Tensor | None


class DataParallel(Protocol):
    """One library's way to keep replicas equal."""

    def gather_weights(self, chunk: int, microbatch: int = -1, bucket: int = -1) -> None:
        """Starts what makes a chunk's weights whole for an action, where they are cut."""
        ...

    def reduce_gradients(self, chunk: int = -1, microbatch: int = -1, bucket: int = -1) -> None:
        """Averages a chunk's gradients over the data-parallel ranks, all where it is -1.

        With a micro-batch: of this one, whose average is added to what the step has so far.
        """
        ...

    def finish_gradients(self) -> None:
        """Ends the step's reductions: every average is there once this returns."""
        ...

    def squared_norm(self) -> Tensor:
        """Returns this rank's share of the squared gradient norm, float64, shape ().

        Summed over all ranks of the launch it counts every element of the model once.
        """
        ...

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies the reduced gradients by `factor`, shape ()."""
        ...

    def step(self, learning_rate: float) -> None:
        """Updates the weights on every rank and drops the gradients."""
        ...

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the optimizer's state tensors by parameter (or flat group) and kind."""
        ...

    def state_parts(self) -> Iterator[StatePart]:
        """Yields what this rank's optimizer holds, weight by weight; zeros before its first step.

        What is written into the parts is what training goes on from, once `weights_loaded`
        has been called.
        """
        ...

    def weights_loaded(self) -> None:
        """Makes the weights anew from what the optimizer updates; collective."""
        ...

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's trained tensors one by one, whole but for tp and ep, and detached.

        Collective: every rank takes all of them, in the same order.
        """
        ...

    def weight_bytes(self) -> int:
        """Returns the bytes of trained weights on the device while a step computes."""
        ...

    def gradient_bytes(self) -> int:
        """Returns the bytes of gradients on the device, at the most."""
        ...

    def optimizer_bytes(self) -> int:
        """Returns the bytes of optimizer state on the device, master copies included."""
        ...

    def host_bytes(self) -> int:
        """Returns the bytes of weights, gradients and optimizer state in host memory."""
        ...


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def numel_bytes(tensors: Iterable[Tensor], width: int | None = None) -> int:
    """Returns the bytes of the tensors' elements, `width` bytes each where it is given."""
    return sum(t.numel() * (width or t.element_size()) for t in tensors)


def in_buckets(tensors: Iterable[Tensor], elements: int = BUCKET_ELEMENTS) -> Iterator[Tensors]:
    """Yields runs of tensors of at most so many elements (a larger one stands alone)."""
    bucket: Tensors = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.numel() > elements:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.numel()
    if bucket:
        yield bucket


def sum_over_(tensors: Iterable[Tensor], group: Group, device: torch.device) -> None:
    """Sums tensors over a group in place, by buckets that travel from `device`."""
    if group.size == 1:
        return
    for bucket in in_buckets(tensors):
        flat = torch.cat([t.reshape(-1) for t in bucket]).to(device)
        group.sum_(flat)
        parts = torch.split(flat, [t.numel() for t in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squared elements, float64, shape ().

    Summed in float64, so that how tensors are cut hardly shows in the norm.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        for part in torch.split(tensor.detach().reshape(-1), _SQUARED_AT_ONCE):
            total += part.square().sum(dtype=torch.float64).to(device)
    return total


def shared_squares(by_replicas: Mapping[int, Iterable[Tensor]], device: torch.device) -> Tensor:
    """Returns a rank's share of the squares of tensors that stand on so many ranks alike."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for replicas, tensors in by_replicas.items():
        total += sum_of_squares(tensors, device) / replicas
    return total
