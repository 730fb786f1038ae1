"""ZeRO stage 1 through DeepSpeed: optimizer state is cut over the data-parallel ranks.

Gradients stay whole until the end of the step (as under DeepSpeed's own pipeline engine),
are then averaged and cut, each rank updates its part, and the weights are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel import deepspeed_internals as internals
from flopwright.executor.parallel.data_parallel.interface import (
    Trainable,
    sum_of_squares,
    tensor_bytes,
)
from flopwright.executor.parallel.optimizers import make_optimizer, parameter_groups

_EXPERT_GROUP = "experts"


class DeepSpeedZero1:
    """DeepSpeed's ZeRO-1 optimizer over ours, with this plan's groups."""

    def __init__(self, trainable: Trainable) -> None:
        internals.quiet_logging()
        internals.start_communication()
        internals.load_muon_uncompiled()
        self._trainable = trainable
        self._device = next(iter(trainable.parameters.values())).device
        self._zero = self._build()
        self._replace_hooks()
        if trainable.precision.master_weights == "none":
            self._update_weights_in_place()
        self._zero.optimizer.place_partitions(self._zero)

    def _build(self) -> Any:
        trainable, groups = self._trainable, self._trainable.groups
        has_experts = bool(trainable.expert_names)
        param_groups = parameter_groups(trainable)
        for name in trainable.expert_names:
            parameter: Any = trainable.parameters[name]
            parameter.allreduce, parameter.group_name = False, _EXPERT_GROUP
        for group in param_groups:
            if group["expert"]:
                group.update(moe=True, name=_EXPERT_GROUP)
        return internals.zero_optimizer_class()(
            init_optimizer=make_optimizer(param_groups, trainable),
            param_names={p: n for n, p in trainable.parameters.items()},
            timers=_Timers(trainable.timer),
            optimizer_params={},
            # Only the contiguous path tells experts from the rest when it reduces.
            contiguous_gradients=True,
            reduce_bucket_size=_bucket_elements(trainable),
            dp_process_group=groups.dp.handle,
            expert_parallel_group={_EXPERT_GROUP: groups.ep.handle} if has_experts else None,
            expert_data_parallel_group=(
                {_EXPERT_GROUP: groups.edp.handle} if has_experts else None
            ),
            reduce_scatter=True,
            overlap_comm=False,
            clip_grad=0.0,  # clipped by us: DeepSpeed averages the norms of different experts
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            gradient_accumulation_steps=1,
            partition_grads=False,
            has_moe_layers=has_experts,
            check_grad_overflow=False,
            compute_grad_norm=False,
        )

    def _replace_hooks(self) -> None:
        """Takes over what happens to a gradient when its micro-batch has made it.

        DeepSpeed's hooks would reduce after each backward pass; here a step reduces once.
        Gradients narrower than fp32 are summed in fp32, where DeepSpeed looks for them.
        """
        for hook in self._zero._grad_acc_hooks:
            hook.remove()
        self._zero._grad_acc_hooks.clear()
        if self._zero.use_grad_accum_attribute:
            for parameter in self._trainable.parameters.values():
                parameter.register_post_accumulate_grad_hook(_sum_in_fp32)  # type: ignore[no-untyped-call]

    def _update_weights_in_place(self) -> None:
        """Lets the optimizer update this rank's part of the weights itself, without a copy."""
        zero = self._zero
        for i, partition in enumerate(zero.single_partition_of_fp32_groups):
            index = torch.distributed.get_rank(zero.real_dp_process_group[i])
            weights = zero.parallel_partitioned_bit16_groups[i][index]
            assert weights.dtype == partition.dtype, "only fp32 weights are their own masters"
            partition.data = weights.data
            for parameter in zero.bit16_groups[i]:
                setattr(parameter, internals.MASTER_MAP_MARK, None)  # would keep the copy alive

    def reduce_gradients(self) -> None:
        """Averages the gradients and keeps this rank's part."""
        name = internals.SUM_MARK if self._zero.use_grad_accum_attribute else "grad"
        for parameter in self._trainable.parameters.values():
            if getattr(parameter, name) is None:  # an expert that no token chose in this step
                dtype = torch.float32 if name == internals.SUM_MARK else parameter.dtype
                setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))
        self._zero.set_gradient_accumulation_boundary(True)
        self._zero.reduce_gradients(pipeline_parallel=True)

    def squared_norm(self) -> Tensor:
        """Returns the squares of this rank's part; replicated experts' parts are cut too."""
        return sum_of_squares(self._partition(), self._device)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies this rank's part by `factor`."""
        for gradient in self._partition():
            gradient.mul_(factor.to(gradient.dtype))

    def step(self, learning_rate: float) -> None:
        """Updates this rank's part and gathers the weights."""
        for group in self._zero.optimizer.param_groups:
            group["lr"] = learning_rate
        self._zero.step()
        self._zero.zero_grad(set_to_none=True)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the moments (or momentum) of this rank's flat parts."""
        return {
            f"group{i}": {k: v for k, v in self._zero.optimizer.state[p].items() if v.ndim}
            for i, p in enumerate(self._zero.single_partition_of_fp32_groups)
            if p in self._zero.optimizer.state
        }

    def gradient_bytes(self) -> int:
        """Returns the bytes of the whole gradients, which live until the reduction."""
        width = 4 if self._zero.use_grad_accum_attribute else None
        return sum(
            p.numel() * (width or p.element_size()) for p in self._trainable.parameters.values()
        )

    def optimizer_bytes(self) -> int:
        """Returns the bytes of moments and of master copies that are not the weights."""
        moments = [t for state in self.optimizer_state().values() for t in state.values()]
        weights = {p.untyped_storage().data_ptr() for p in self._trainable.parameters.values()}
        masters = [
            p
            for p in self._zero.single_partition_of_fp32_groups
            if p.untyped_storage().data_ptr() not in weights
        ]
        return tensor_bytes([*moments, *masters])

    def _partition(self) -> Iterator[Tensor]:
        for pieces in self._zero.averaged_gradients.values():
            for piece in pieces or ():
                if not getattr(piece, internals.ZERO_PADDING_MARK, False):
                    yield piece


def _sum_in_fp32(parameter: Tensor) -> None:
    """Adds a micro-batch's gradient to the fp32 sum and drops it."""
    assert parameter.grad is not None
    total = getattr(parameter, internals.SUM_MARK)
    if total is None:
        setattr(parameter, internals.SUM_MARK, parameter.grad.float())
    else:
        total.add_(parameter.grad)
    parameter.grad = None


def _bucket_elements(trainable: Trainable) -> int:
    """Returns the reduction bucket: the whole model where it is small, 500M elements at most."""
    return min(500_000_000, sum(p.numel() for p in trainable.parameters.values()))


class _Timers:
    """DeepSpeed's timer interface: its gathering of weights becomes an action of the trace."""

    def __init__(self, timer: ActionTimer) -> None:
        self._timer = timer
        self._gather = internals.gather_timer_name()

    def __call__(self, name: str) -> _Timers | _NoTimer:
        return self if name == self._gather else _NO_TIMER

    def start(self) -> None:
        self._timer.begin("gather_weights", "dp_comm")

    def stop(self) -> None:
        self._timer.end()

    def log(self, names: list[str]) -> None:
        """Nothing is logged: the trace has it."""


class _NoTimer:
    def start(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


_NO_TIMER = _NoTimer()
