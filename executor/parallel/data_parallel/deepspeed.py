"""ZeRO stages 1 and 2 through DeepSpeed, over its optimizer without its engine.

Stage 1: gradients stay whole until the end of the step (as under DeepSpeed's own pipeline
engine), are then averaged and cut, each rank updates its part, and the weights are gathered.
Stage 2: gradients are averaged and cut in buckets inside each backward pass, what is left of a
micro-batch where the lowered list says, and each rank sums its part over micro-batches. With
the optimizer on the host its parts go there once a step, or (fp32, stage 2) as they are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel import deepspeed_internals as internals
from flopwright.executor.parallel.data_parallel.interface import (
    StatePart,
    Trainable,
    numel_bytes,
    shared_squares,
    sum_over_,
    tensor_bytes,
)
from flopwright.executor.parallel.optimizers import make_optimizer, parameter_groups
from flopwright.plan.parallel import ParallelPlan

_EXPERT_GROUP = "experts"


class DeepSpeedZero:
    """DeepSpeed's ZeRO-1 and 2 optimizer over ours, with this plan's groups."""

    def __init__(self, plan: ParallelPlan, trainable: Trainable) -> None:
        internals.quiet_logging()
        internals.start_communication()
        internals.load_muon_uncompiled()
        self._trainable, self._cuts_gradients = trainable, plan.zero_stage == 2
        self._on_host = plan.optimizer_offload
        self._device = next(iter(trainable.parameters.values())).device
        self._names = {p: n for n, p in trainable.parameters.items()}
        self._zero = self._build()
        self._seen: set[Tensor] = set()  # whose gradients the micro-batch has made (stage 2)
        self._replace_hooks()
        if self._on_host:
            self._zero.compute_grad_norm = False  # it must be asked for, but is ours
        elif trainable.precision.master_weights == "none":
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
            param_names=self._names,
            timers=Timers(trainable.timer),
            optimizer_params={},
            # Only the contiguous path tells experts from the rest when it reduces.
            contiguous_gradients=True,
            reduce_bucket_size=bucket_elements(trainable),
            dp_process_group=groups.dp_cp.handle,
            expert_parallel_group={_EXPERT_GROUP: groups.ep.handle} if has_experts else None,
            expert_data_parallel_group=(
                {_EXPERT_GROUP: groups.edp.handle} if has_experts else None
            ),
            reduce_scatter=True,
            overlap_comm=False,
            offload_optimizer_config=internals.host_offload(pin_memory=self._device.type == "cuda")
            if self._on_host
            else None,
            clip_grad=0.0,  # clipped by us: DeepSpeed averages the norms of different experts
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            gradient_accumulation_steps=1,
            partition_grads=self._cuts_gradients,
            has_moe_layers=has_experts,
            check_grad_overflow=False,
            compute_grad_norm=self._on_host,  # DeepSpeed insists
        )

    def _replace_hooks(self) -> None:
        """Takes over what happens to a gradient when its micro-batch has made it.

        DeepSpeed's hooks guess when a backward pass has ended; here the lowered list says.
        In stage 1 gradients narrower than fp32 are summed in fp32, where DeepSpeed looks for
        them; in stage 2 they are reduced as soon as a bucket is full.
        """
        zero = self._zero
        for hook in zero._grad_acc_hooks:
            hook.remove()
        zero._grad_acc_hooks.clear()
        for i, group in enumerate(zero.bit16_groups):
            for parameter in group:
                if self._cuts_gradients:
                    parameter.register_post_accumulate_grad_hook(self._reducing(i))
                elif zero.use_grad_accum_attribute:
                    parameter.register_post_accumulate_grad_hook(_sum_in_fp32)

    def _reducing(self, group: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._seen.add(parameter)
                self._zero.process_gradients(parameter, group)

        return hook

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

    def gather_weights(self, chunk: int, microbatch: int = -1, bucket: int = -1) -> None:
        """Does nothing: the step has gathered the weights."""

    def reduce_gradients(self, chunk: int = -1, microbatch: int = -1, bucket: int = -1) -> None:
        """Averages the gradients and keeps this rank's part; in stage 2 a micro-batch's."""
        if self._cuts_gradients:
            self._end_microbatch()
            return
        name = internals.SUM_MARK if self._zero.use_grad_accum_attribute else "grad"
        for parameter in self._names:
            if getattr(parameter, name) is None:  # an expert that no token chose in this step
                dtype = torch.float32 if name == internals.SUM_MARK else parameter.dtype
                setattr(parameter, name, torch.zeros_like(parameter, dtype=dtype))
        self._mend((n, getattr(p, name)) for p, n in self._names.items())
        self._zero.set_gradient_accumulation_boundary(True)
        self._zero.reduce_gradients(pipeline_parallel=True)

    def _end_microbatch(self) -> None:
        """Reduces what is left of a micro-batch's gradients.

        Ranks reduce in the order in which their gradients appear, so a missing one would mix
        up tensors without a word.
        """
        missing = [n for p, n in self._names.items() if p not in self._seen]
        if missing:
            raise RuntimeError(f"ZeRO-2: this micro-batch made no gradient of {missing[0]}")
        self._seen.clear()
        self._zero.set_gradient_accumulation_boundary(False)
        self._zero.overlapping_partition_gradients_reduce_epilogue()

    def finish_gradients(self) -> None:
        """Ends stage 2's sums over micro-batches."""
        if not self._cuts_gradients:
            return
        self._zero.finalize_gradient_accumulation_boundary()
        if self._on_host:
            self._zero._wait_for_offload_copies()
        self._mend(self._pieces())

    def _mend(self, gradients: Iterable[tuple[str, Tensor]]) -> None:
        """Does what DeepSpeed's average over dp x cp leaves out: tp's sums, experts' copies."""
        trainable, partial = self._trainable, list[Tensor]()
        for name, gradient in gradients:
            if name in trainable.tp_partial_names:
                partial.append(gradient)
            if trainable.is_expert(name) and trainable.expert_copies > 1:
                gradient.div_(trainable.expert_copies)
        sum_over_(partial, trainable.groups.tp, self._device)

    def squared_norm(self) -> Tensor:
        """Returns the squares of this rank's part; replicated experts' parts are cut too."""
        by_replicas: dict[int, list[Tensor]] = {}
        if self._on_host:
            self._zero._wait_for_offload_copies()
        for name, piece in self._pieces():
            by_replicas.setdefault(self._trainable.tp_replicas(name), []).append(piece)
        return shared_squares(by_replicas, self._device)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies this rank's part by `factor`."""
        for _, piece in self._pieces():
            piece.mul_(factor.to(piece.device, piece.dtype))

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

    def state_parts(self) -> Iterator[StatePart]:
        """Yields what this rank's flat parts hold of each weight."""
        parts: Iterator[StatePart] = self._zero.optimizer.state_parts()
        return parts

    def weights_loaded(self) -> None:
        """Gathers the weights from all ranks' parts."""
        self._zero.update_lp_params()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights, which the step has gathered."""
        for name, parameter in self._trainable.parameters.items():
            yield name, parameter.detach()

    def weight_bytes(self) -> int:
        """Returns the bytes of the weights."""
        return numel_bytes(self._names)

    def gradient_bytes(self) -> int:
        """Returns the bytes of the whole gradients (stage 1), or of this rank's sums of them."""
        wide = self._zero.dtype != torch.float32
        if not self._cuts_gradients:
            return numel_bytes(self._names, 4 if wide else None)
        # On their way to the host, fp32 sums of narrow gradients stay here until the step.
        return 0 if self._on_host and not wide else 4 * sum(map(int, self._zero.partition_size))

    def optimizer_bytes(self) -> int:
        """Returns the bytes of moments and of master copies that are not the weights."""
        return 0 if self._on_host else self._state_bytes()

    def host_bytes(self) -> int:
        """Returns the bytes of moments, copies and gradients that the optimizer has there."""
        if not self._on_host:
            return 0
        return self._state_bytes() + 4 * sum(map(int, self._zero.partition_size))

    def _state_bytes(self) -> int:
        moments = [t for state in self.optimizer_state().values() for t in state.values()]
        weights = {p.untyped_storage().data_ptr() for p in self._names}
        masters = [
            p
            for p in self._zero.single_partition_of_fp32_groups
            if p.untyped_storage().data_ptr() not in weights
        ]
        return tensor_bytes([*moments, *masters])

    def _pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's averaged gradients: (name, run of the tensor's elements)."""
        zero = self._zero
        for i, held in enumerate(zero.params_in_partition):
            if self._on_host:
                flat = zero.single_partition_of_fp32_groups[i].grad
                for parameter in held:
                    _, _, begin, numel = zero.grad_position[zero.get_param_id(parameter)]
                    yield self._names[parameter], flat.narrow(0, begin, numel)
                continue
            pieces = zero.averaged_gradients.get(i) or ()
            mine = [p for p in pieces if not getattr(p, internals.ZERO_PADDING_MARK, False)]
            for parameter, piece in zip(held, mine, strict=False):  # zeros may stand behind
                yield self._names[parameter], piece


def _sum_in_fp32(parameter: Tensor) -> None:
    """Adds a micro-batch's gradient to the fp32 sum and drops it."""
    if parameter.grad is None:  # put off: the second half of a split backward makes it
        return
    total = getattr(parameter, internals.SUM_MARK)
    if total is None:
        setattr(parameter, internals.SUM_MARK, parameter.grad.float())
    else:
        total.add_(parameter.grad)
    parameter.grad = None


def bucket_elements(trainable: Trainable) -> int:
    """Returns the reduction bucket: the whole model where it is small, 500M elements at most."""
    return min(500_000_000, sum(p.numel() for p in trainable.parameters.values()))


class Timers:
    """DeepSpeed's timer interface: its gathering of weights becomes an action of the trace."""

    def __init__(self, timer: ActionTimer) -> None:
        self._timer = timer
        self._gather = internals.gather_timer_name()

    def __call__(self, name: str) -> Timers | _NoTimer:
        """Returns itself for the gathering of weights, for anything else one that does nothing."""
        return self if name == self._gather else _NO_TIMER

    def start(self) -> None:
        """Begins the action."""
        self._timer.begin("gather_weights", "dp_comm")

    def stop(self) -> None:
        """Ends it."""
        self._timer.end()

    def log(self, names: list[str]) -> None:
        """Nothing is logged: the trace has it."""


class _NoTimer:
    def start(self) -> None:
        """Does nothing."""

    def stop(self) -> None:
        """Does nothing."""


_NO_TIMER = _NoTimer()
