"""Data parallelism without a library: full optimizer state everywhere, one all-reduce a bucket.

Used for ZeRO stage 0 and wherever a pipeline stage has a single replica. Weights narrower
than their master copy are updated through it, and their gradients are summed in the master
copy's precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from flopwright.executor.parallel.data_parallel.interface import (
    Trainable,
    adamw,
    parameter_groups,
    sum_of_squares,
    tensor_bytes,
)
from flopwright.executor.parallel.groups import Group

BUCKET_ELEMENTS: Final = 25_000_000


class ReplicatedDataParallel:
    """All-reduces gradients; every rank makes the same update."""

    def __init__(self, trainable: Trainable) -> None:
        self._trainable = trainable
        self._device = next(iter(trainable.parameters.values())).device
        self._masters = self._make_masters()
        updated = {n: self._masters.get(n, p) for n, p in trainable.parameters.items()}
        self._updated: Mapping[str, nn.Parameter] = updated
        view = Trainable(
            parameters=updated,
            expert_names=trainable.expert_names,
            groups=trainable.groups,
            optimizer=trainable.optimizer,
            precision=trainable.precision,
            timer=trainable.timer,
        )
        self._optimizer = adamw(parameter_groups(view), trainable.optimizer)

    def _make_masters(self) -> dict[str, nn.Parameter]:
        """Returns a wider copy of each weight that has one, fed by gradient hooks."""
        if self._trainable.precision.master_weights == "none":
            return {}
        masters = {}
        for name, parameter in self._trainable.parameters.items():
            if parameter.dtype.itemsize >= torch.float32.itemsize:
                continue
            master = nn.Parameter(parameter.detach().float())
            masters[name] = master
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                _accumulate_into(master)
            )
        return masters

    def reduce_gradients(self) -> None:
        """Averages the gradients; see the interface for what is summed over which ranks."""
        groups = self._trainable.groups
        for expert, group in ((False, groups.dp), (True, groups.edp)):
            names = [n for n in self._updated if self._trainable.is_expert(n) == expert]
            for bucket in _buckets([self._gradient(n) for n in names]):
                _reduce_bucket(bucket, group, groups.dp.size)

    def squared_norm(self) -> Tensor:
        """Returns this rank's share: replicas divide what they hold in common."""
        groups = self._trainable.groups
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for expert, group in ((False, groups.dp), (True, groups.edp)):
            names = [n for n in self._updated if self._trainable.is_expert(n) == expert]
            share = sum_of_squares((self._gradient(n) for n in names), self._device)
            total += share / group.size
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies the gradients by `factor`."""
        for name in self._updated:
            gradient = self._gradient(name)
            gradient.mul_(factor.to(gradient.dtype))

    def step(self, learning_rate: float) -> None:
        """Runs AdamW and copies masters back into the weights."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, master in self._masters.items():
                self._trainable.parameters[name].copy_(master)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns AdamW's moments by parameter name."""
        return {
            name: {k: v for k, v in self._optimizer.state[p].items() if v.ndim}
            for name, p in self._updated.items()
            if p in self._optimizer.state
        }

    def gradient_bytes(self) -> int:
        """Returns the bytes of one gradient a trained tensor."""
        return sum(p.numel() * p.element_size() for p in self._updated.values())

    def optimizer_bytes(self) -> int:
        """Returns the bytes of moments and master copies."""
        moments = [t for state in self.optimizer_state().values() for t in state.values()]
        return tensor_bytes([*moments, *self._masters.values()])

    def _gradient(self, name: str) -> Tensor:
        parameter = self._updated[name]
        if parameter.grad is None:  # an expert that no token chose in this step
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


def _accumulate_into(master: nn.Parameter) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return hook


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields runs of gradients of at most BUCKET_ELEMENTS (a larger one stands alone)."""
    bucket: list[Tensor] = []
    elements = 0
    for gradient in gradients:
        if bucket and elements + gradient.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, elements = [], 0
        bucket.append(gradient)
        elements += gradient.numel()
    if bucket:
        yield bucket


def _reduce_bucket(bucket: list[Tensor], group: Group, dp_size: int) -> None:
    """Sums a bucket over `group` and divides by the data-parallel size, in place."""
    if group.size > 1:
        flat = torch.cat([g.reshape(-1) for g in bucket])
        group.sum_(flat)
        parts = torch.split(flat, [g.numel() for g in bucket])
        for gradient, part in zip(bucket, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
    if dp_size > 1:
        for gradient in bucket:
            gradient.div_(dp_size)
