"""Data parallelism without a library: full optimizer state everywhere, one all-reduce a bucket.

Used for ZeRO stage 0 and wherever a pipeline stage has a single replica. Weights narrower
than their master copy are updated through it, and their gradients are summed in the master
copy's precision. With the optimizer on the host, the copies it updates live there, and a
step's gradients go there and the weights come back once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from flopwright.executor.parallel.data_parallel.interface import (
    StatePart,
    Trainable,
    in_buckets,
    numel_bytes,
    shared_squares,
    sum_over_,
    tensor_bytes,
)
from flopwright.executor.parallel.optimizers import make_optimizer, parameter_groups


class ReplicatedDataParallel:
    """All-reduces gradients; every rank makes the same update.

    Args:
        on_host: the optimizer's state and the copies it updates live in host memory.
    """

    def __init__(self, trainable: Trainable, *, on_host: bool = False) -> None:
        self._trainable, self._on_host = trainable, on_host
        self._sums: dict[str, Tensor] = {}  # of gradients wider than the weights
        self._copies = self._make_copies()
        updated = {n: self._copies.get(n, p) for n, p in trainable.parameters.items()}
        self._updated: Mapping[str, nn.Parameter] = updated
        view = replace(trainable, parameters=updated)
        self._optimizer = make_optimizer(parameter_groups(view), view)

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._trainable.parameters.values()), torch.device("cpu"))

    def _make_copies(self) -> dict[str, nn.Parameter]:
        """Returns what is updated in a weight's place: a wider copy, or one on the host.

        Hooks sum the gradients of narrow weights in the copy's precision.
        """
        masters = self._trainable.precision.master_weights != "none"
        copies = {}
        for name, parameter in self._trainable.parameters.items():
            narrow = masters and parameter.dtype.itemsize < torch.float32.itemsize
            if narrow:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    _sum_into(self._sums, name)
                )
            if narrow or self._on_host:
                dtype = torch.float32 if narrow else parameter.dtype
                copy = parameter.detach().to("cpu" if self._on_host else parameter.device, dtype)
                copies[name] = nn.Parameter(self._pinned(copy, parameter))
        return copies

    def _pinned(self, copy: Tensor, parameter: Tensor) -> Tensor:
        """Returns a copy that shares nothing with its weight, page-locked on the host."""
        if copy.device != parameter.device:
            return copy.pin_memory()
        return copy.clone() if copy.data_ptr() == parameter.data_ptr() else copy

    def gather_weights(self, chunk: int, microbatch: int = -1, bucket: int = -1) -> None:
        """Does nothing: weights are whole everywhere."""

    def reduce_gradients(self, chunk: int = -1, microbatch: int = -1, bucket: int = -1) -> None:
        """Averages the gradients; see the interface for what is summed over which ranks."""
        trainable, names = self._trainable, self._trainable.names_of(chunk)
        partial = [self._gradient(n) for n in names if n in trainable.tp_partial_names]
        sum_over_(partial, trainable.groups.tp, self._device)
        for expert in (False, True):
            mine = [n for n in names if trainable.is_expert(n) == expert]
            for bucket_names in in_buckets([self._gradient(n) for n in mine]):
                self._average(bucket_names, mine[0])

    def _average(self, gradients: Sequence[Tensor], name: str) -> None:
        sum_over_(gradients, self._trainable.sum_group(name), self._device)
        mean_over = self._trainable.mean_over(expert=self._trainable.is_expert(name))
        if mean_over > 1:
            for gradient in gradients:
                gradient.div_(mean_over)

    def finish_gradients(self) -> None:
        """Does nothing: reductions end as they are called."""

    def squared_norm(self) -> Tensor:
        """Returns this rank's share: replicas divide what they hold in common."""
        by_replicas: dict[int, list[Tensor]] = {}
        for name in self._updated:
            replicas = self._trainable.sum_group(name).size * self._trainable.tp_replicas(name)
            by_replicas.setdefault(replicas, []).append(self._gradient(name))
        return shared_squares(by_replicas, self._device)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies the gradients by `factor`."""
        for name in self._updated:
            gradient = self._gradient(name)
            gradient.mul_(factor.to(gradient.dtype))

    def step(self, learning_rate: float) -> None:
        """Runs the optimizer and copies what it updated back into the weights."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for name, copy in self._copies.items():
            copy.grad = self._gradient(name).to(copy.device)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._sums.clear()
        with torch.no_grad():
            for name, copy in self._copies.items():
                parameter = self._trainable.parameters[name]
                parameter.copy_(copy, non_blocking=True)
                parameter.grad = None

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the optimizer's moments by parameter name."""
        return {
            name: {k: v for k, v in self._optimizer.state[p].items() if v.ndim}
            for name, p in self._updated.items()
            if p in self._optimizer.state
        }

    def state_parts(self) -> Iterator[StatePart]:
        """Yields what the optimizer holds of each weight: all of it, on every rank."""
        return self._optimizer.state_parts()

    @torch.no_grad()
    def weights_loaded(self) -> None:
        """Copies what is updated in the weights' place into them."""
        for name, copy in self._copies.items():
            self._trainable.parameters[name].copy_(copy)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights as they are."""
        for name, parameter in self._trainable.parameters.items():
            yield name, parameter.detach()

    def weight_bytes(self) -> int:
        """Returns the bytes of the weights."""
        return numel_bytes(self._trainable.parameters.values())

    def gradient_bytes(self) -> int:
        """Returns the bytes of one gradient a trained tensor."""
        return numel_bytes(self._updated.values())

    def optimizer_bytes(self) -> int:
        """Returns the bytes of moments and master copies, none where they are on the host."""
        return 0 if self._on_host else self._state_bytes()

    def host_bytes(self) -> int:
        """Returns the bytes of what the optimizer keeps on the host."""
        return self._state_bytes() if self._on_host else 0

    def _state_bytes(self) -> int:
        moments = [t for state in self.optimizer_state().values() for t in state.values()]
        return tensor_bytes([*moments, *self._copies.values()])

    def _gradient(self, name: str) -> Tensor:
        """Returns the sum of a tensor's gradients, zeros where nothing made one in this step."""
        parameter, wide = self._trainable.parameters[name], self._updated[name].dtype
        if wide != parameter.dtype:
            if name not in self._sums:
                self._sums[name] = torch.zeros_like(parameter, dtype=wide)
            return self._sums[name]
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad


def _sum_into(sums: dict[str, Tensor], name: str) -> Callable[[Tensor], None]:
    def hook(parameter: Tensor) -> None:
        if parameter.grad is None:  # put off: the second half of a split backward makes it
            return
        if name in sums:
            sums[name].add_(parameter.grad)
        else:
            sums[name] = parameter.grad.float()
        parameter.grad = None

    return hook
