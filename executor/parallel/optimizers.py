"""The update rule of a plan, over whatever its data-parallel library lets the optimizer see.

AdamW is torch's. Under Muon hidden matrices (`spec/parameters.py` says which) are updated by
it and the rest by AdamW. QK-Clip scales rows of what was just updated, so that master copies,
partitions and the weights made from them agree in every bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, overload

import torch
from torch import Tensor

from flopwright.executor.parallel.data_parallel.interface import StatePart, Trainable
from flopwright.executor.parallel.data_parallel.muon import Orthogonaliser
from flopwright.executor.parallel.data_parallel.muon_cuts import (
    Held,
    deepspeed_partitions,
    deepspeed_stage3_partitions,
    held_by,
    local,
)
from flopwright.executor.parallel.groups import Group
from flopwright.models.optim.muon.cost import compute_dtype
from flopwright.models.optim.muon.module import blend_, update_scale
from flopwright.models.optim.qk_clip.module import scale_rows_

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def parameter_groups(trainable: Trainable) -> list[dict[str, Any]]:
    """Returns the optimizer's groups: dense and expert tensors, by update rule and decay.

    Vectors (norm gains) are not decayed. Empty groups are left out. Each group carries
    "expert", "muon", "names" (of its parameters, in order) and "weight_decay".
    """
    by_muon = trainable.optimizer.kind == "muon"
    assert trainable.matrices or not by_muon, "Muon must be told which tensors are matrices"
    found: dict[tuple[bool, bool, bool], list[str]] = {}
    for name, parameter in trainable.parameters.items():
        muon = by_muon and name in trainable.matrices
        found.setdefault((trainable.is_expert(name), muon, parameter.ndim >= 2), []).append(name)
    return [
        {
            "params": [trainable.parameters[name] for name in names],
            "names": names,
            "expert": expert,
            "muon": muon,
            "weight_decay": trainable.optimizer.weight_decay if decayed else 0.0,
        }
        for (expert, muon, decayed), names in sorted(found.items(), key=lambda item: item[0])
    ]


def make_optimizer(groups: Iterable[dict[str, Any]], trainable: Trainable) -> WeightUpdate:
    """Returns the plan's optimizer over groups as `parameter_groups` makes them.

    The learning rate is set before each step; gradients come averaged and clipped.
    """
    return WeightUpdate(list(groups), trainable)


class WeightUpdate(torch.optim.AdamW):
    """AdamW, Muon for groups marked so, then the row factors of the step.

    With parameters cut over ranks a step is collective over them: see `Orthogonaliser`.
    """

    def __init__(self, groups: list[dict[str, Any]], trainable: Trainable) -> None:
        spec = trainable.optimizer
        super().__init__(groups, lr=0.0, betas=(spec.beta1, spec.beta2), eps=spec.eps, fused=True)
        self._trainable = trainable
        self._dtype = _DTYPES[compute_dtype(trainable.precision)]
        self._orthogonalise = Orthogonaliser(trainable.matrices, trainable.groups, trainable.timer)
        rank = trainable.groups.world.ranks[trainable.groups.world.index]
        alone = Group((rank,), 0, None)
        self._held = {
            p: [held_by(name, p, alone)]
            for group in self.param_groups
            for name, p in zip(group["names"], group["params"], strict=True)
        }

    def place_partitions(self, zero: Any) -> None:
        """Learns what DeepSpeed's flat partitions hold, which took the parameters' places.

        Args:
            zero: DeepSpeed's optimizer of any ZeRO stage over this one.
        """
        names = {p: name for name, p in self._trainable.parameters.items()}
        groups = self._trainable.groups
        if hasattr(zero, "fp32_partitioned_groups_flat"):
            self._held = dict(deepspeed_stage3_partitions(zero, names, groups.dp_cp))
        else:
            self._held = dict(deepspeed_partitions(zero, names, groups))

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every group; there is no closure to evaluate again."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [g for g in groups if not g["muon"]]
        super().step()
        self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._muon(group)
        for group in groups:
            self._scale_rows(group["params"], self._trainable.row_factors)
        return None

    def state_parts(self) -> Iterator[StatePart]:
        """Yields what is held of each weight; state that no step has made yet is zeros."""
        for parameter, parts in self._held.items():
            if not parts:
                continue
            state = self._state(parameter, parts[0].name)
            for held in parts:
                yield StatePart(
                    held=held,
                    updated=held.of(local(parameter.detach())),
                    state={k: held.of(local(v)) for k, v in state.items() if v.ndim},
                    steps=state.get("step"),
                )

    def _state(self, parameter: Tensor, name: str) -> dict[str, Tensor]:
        """Returns a parameter's state as the first step would begin with it."""
        state: dict[str, Tensor] = self.state[parameter]
        if self._trainable.optimizer.kind == "muon" and name in self._trainable.matrices:
            self._momentum(parameter)
        elif "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = torch.zeros_like(parameter, requires_grad=False)
        return state

    def _muon(self, group: Mapping[str, Any]) -> None:
        """Updates matrices; those whose state is on the host are orthogonalised on the device."""
        lr, mu = group["lr"], self._trainable.optimizer.momentum
        places = [(p, held) for p in group["params"] for held in self._held[p]]
        for batch in self._orthogonalise.batches([held for _, held in places]):
            some = [places[i] for i in batch]
            updates = [
                blend_(held.of(self._momentum(p)), held.of(_gradient(p)), mu).to(
                    self._trainable.timer.device, self._dtype
                )
                for p, held in some
            ]
            parts = [held for _, held in some]
            for (p, held), update in zip(some, self._orthogonalise(parts, updates), strict=True):
                weight = held.of(local(p))
                weight.mul_(1 - lr * group["weight_decay"])
                weight.add_(update.to(weight.device), alpha=-lr * self._scale(held))

    def _momentum(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return local(state["momentum_buffer"])

    def _scale(self, held: Held) -> float:
        layout, groups = self._trainable.matrices[held.name], self._trainable.groups
        sizes = [held.shape[-2] // layout.parts, held.shape[-1]]
        if layout.axis:
            sizes[layout.dim] *= getattr(groups, layout.axis).size
        return update_scale(*sizes)

    def _scale_rows(self, parameters: Iterable[Tensor], factors: Mapping[str, Tensor]) -> None:
        if not factors:
            return
        for parameter in parameters:
            for held in self._held[parameter]:
                if held.name in factors:
                    _scale_part(held, local(parameter), factors[held.name])


def _gradient(parameter: Tensor) -> Tensor:
    if parameter.grad is None:  # an expert that no token chose in this step
        parameter.grad = torch.zeros_like(parameter)
    return local(parameter.grad)


def _scale_part(held: Held, flat: Tensor, factor: Tensor) -> None:
    """Multiplies the rows of a weight, as far as this rank holds them, by [rows] factors."""
    first, end = held.run
    if end == first:
        return
    width = 1
    for size in held.shape[1:]:
        width *= size
    begin = first // width
    each = factor[begin : -(-end // width)].repeat_interleave(width)
    scale_rows_(held.of(flat), each.to(flat.device)[first - begin * width :][: end - first])
