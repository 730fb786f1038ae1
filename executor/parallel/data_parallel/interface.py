"""What every data-parallel library must offer the training loop.

One step: gradients have been summed over this rank's micro-batches (each the mean over its
own tokens, over the number of micro-batches) in the parameters' `.grad`; then

    reduce_gradients() -> squared_norm() -> scale_gradients(f) -> step(learning_rate)

after which every rank holds the new weights and no gradients. A gradient is averaged over
the whole data-parallel size: dense ones are summed over the dp group, an expert's over the
ranks that hold the same experts (its gradient already sums over the tokens of its expert
group). Both are divided by the dp size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.groups import Groups
from flopwright.models.optim.muon.layout import MatrixLayout
from flopwright.spec.workload import Optimizer, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """What is trained on this rank.

    Attributes:
        parameters: trainable parameters by full name, in model order.
        expert_names: those that are a slice of the stacked experts under ep > 1.
        matrices: those that Muon orthogonalises (models/optim/muon/layout.py).
        row_factors: by what the next update multiplies rows of a tensor last (QK-Clip).
    """

    parameters: Mapping[str, nn.Parameter]
    expert_names: frozenset[str]
    groups: Groups
    optimizer: Optimizer
    precision: Precision
    timer: ActionTimer
    matrices: Mapping[str, MatrixLayout] = field(default_factory=dict)
    row_factors: dict[str, Tensor] = field(default_factory=dict)

    def is_expert(self, name: str) -> bool:
        """Whether the gradient is reduced over the expert-data-parallel group."""
        return name in self.expert_names


class DataParallel(Protocol):
    """One library's way to keep replicas equal."""

    def reduce_gradients(self) -> None:
        """Averages the gradients over the data-parallel ranks."""
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

    def gradient_bytes(self) -> int:
        """Returns the bytes of gradient storage alive before a step's reduction."""
        ...

    def optimizer_bytes(self) -> int:
        """Returns the bytes of optimizer state, master copies included."""
        ...


def parameter_groups(trainable: Trainable) -> list[dict[str, Any]]:
    """Returns AdamW's groups: dense and expert tensors, each with and without weight decay.

    Vectors (norm gains) are not decayed. Empty groups are left out.
    """
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in trainable.parameters.items():
        key = (trainable.is_expert(name), parameter.ndim >= 2)
        groups.setdefault(key, []).append(parameter)
    return [
        {
            "params": params,
            "expert": expert,
            "weight_decay": trainable.optimizer.weight_decay if decayed else 0.0,
        }
        for (expert, decayed), params in sorted(groups.items(), key=lambda item: item[0])
    ]


def adamw(groups: Iterable[dict[str, Any]], optimizer: Optimizer) -> torch.optim.AdamW:
    """Returns AdamW over the groups; the learning rate is set before each step."""
    return torch.optim.AdamW(
        list(groups),
        lr=0.0,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.eps,
        fused=True,
    )


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Returns the sum of squared elements, float64, shape ()."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor.detach()).double() ** 2
    return total
