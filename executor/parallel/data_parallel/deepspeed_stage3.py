"""ZeRO stage 3 through DeepSpeed, over its optimizer without its engine.

Each weight is cut flat over the data-parallel ranks; DeepSpeed's module hooks gather those of a
layer inside forward and backward, prefetch the next ones in the order that it has traced, and
let go of them. Gradients are averaged and cut in buckets inside each backward pass, what is
left of a micro-batch where the lowered list says, and each rank sums its part over
micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from flopwright.executor.parallel.data_parallel import deepspeed_internals as internals
from flopwright.executor.parallel.data_parallel.deepspeed import Timers, bucket_elements
from flopwright.executor.parallel.data_parallel.interface import (
    StatePart,
    Trainable,
    shared_squares,
    sum_over_,
    tensor_bytes,
)
from flopwright.executor.parallel.optimizers import make_optimizer, parameter_groups
from flopwright.models.transformer.module import Stage
from flopwright.plan.parallel import ParallelPlan


class DeepSpeedZero3:
    """DeepSpeed's ZeRO-3 optimizer over ours, with this plan's groups."""

    def __init__(self, plan: ParallelPlan, trainable: Trainable) -> None:
        internals.quiet_logging()
        internals.start_communication()
        internals.load_muon_uncompiled()
        assert not trainable.expert_names, "DeepSpeed's stage 3 cuts over one group"
        (self._module,) = trainable.chunks.values()
        self._trainable, self._plan = trainable, plan
        first = next(iter(trainable.parameters.values()))
        self._device, self._dtype = first.device, first.dtype
        self._names = {p: n for n, p in trainable.parameters.items()}
        self._seen: set[Tensor] = set()  # whose gradients the micro-batch has made
        self._zero = self._build()
        self._replace_hooks()
        if trainable.precision.master_weights == "none" and not plan.optimizer_offload:
            self._update_weights_in_place()
        self._zero.optimizer.place_partitions(self._zero)

    def _build(self) -> Any:
        trainable, plan, pin = self._trainable, self._plan, self._device.type == "cuda"
        group = trainable.groups.dp_cp.handle
        # These look at the tensors' shapes, which are gone once they are cut.
        optimizer = make_optimizer(parameter_groups(trainable), trainable)
        bucket = bucket_elements(trainable)
        weights_away = internals.host_weights(pin_memory=pin) if plan.parameter_offload else None
        internals.cut_weights(self._module, group, self._dtype, weights_away)
        if isinstance(self._module, Stage):
            for layer in self._module.blocks():
                internals.gather_together(layer)
            if self._module.model.embed_positions is not None:  # the stage itself reads its rows
                internals.used_by(self._module, self._module.model.embed_positions.weight)
        return internals.stage3_optimizer_class()(
            module=self._module,
            init_optimizer=optimizer,
            param_names=self._names,
            timers=Timers(trainable.timer),
            ds_config={},
            contiguous_gradients=True,
            reduce_bucket_size=bucket,
            param_persistence_threshold=0,  # every weight is cut, as the plan says
            dp_process_group=group,
            reduce_scatter=True,
            overlap_comm=False,
            offload_optimizer_config=internals.host_offload(pin_memory=pin)
            if plan.optimizer_offload
            else None,
            offload_param_config=weights_away,
            offload_ratio=1.0,
            clip_grad=0.0,
            gradient_accumulation_dtype=torch.float32,
            communication_data_type=torch.float32,
            gradient_accumulation_steps=1,
        )

    def _replace_hooks(self) -> None:
        """Takes over when a micro-batch's gradients are complete: the lowered list says so."""
        for hooks in (self._zero._grad_acc_hooks, self._zero._leaf_module_hooks):
            for hook in hooks:
                hook.remove()
            hooks.clear()
        for parameter in self._names:
            parameter.register_post_accumulate_grad_hook(self._reducing())  # type: ignore[no-untyped-call]

    def _reducing(self) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            if parameter.grad is not None:
                self._seen.add(parameter)
                self._zero.reduce_ready_partitions_and_remove_grads(parameter)

        return hook

    def _update_weights_in_place(self) -> None:
        """Lets the optimizer update this rank's part of the weights itself, without a copy."""
        zero = self._zero
        for wide, weights in zip(
            zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat, strict=True
        ):
            assert weights.dtype == wide.dtype, "only fp32 weights are their own masters"
            wide.data = weights.data

    def gather_weights(self, chunk: int, microbatch: int = -1, bucket: int = -1) -> None:
        """Does nothing: module hooks gather inside the compute that follows."""

    def reduce_gradients(self, chunk: int = -1, microbatch: int = -1, bucket: int = -1) -> None:
        """Reduces what is left of a micro-batch's gradients, and adds its part to the sums."""
        missing = [n for p, n in self._names.items() if p not in self._seen]
        if missing:
            raise RuntimeError(f"ZeRO-3: this micro-batch made no gradient of {missing[0]}")
        self._seen.clear()
        self._zero.set_gradient_accumulation_boundary(False)
        self._zero.overlapping_partition_gradients_reduce_epilogue()
        self._zero.clear_backward_seen_flag()  # the next micro-batch adds to this one
        self._zero.parameter_offload.release_backward_leftovers()

    def finish_gradients(self) -> None:
        """Ends the sums over micro-batches."""
        self._zero.finalize_gradient_accumulation_boundary()
        partial = self._trainable.tp_partial_names
        parts = [piece for name, piece in self._pieces() if name in partial]
        sum_over_(parts, self._trainable.groups.tp, self._device)

    def squared_norm(self) -> Tensor:
        """Returns the squares of this rank's parts (what pads them is zero)."""
        by_replicas: dict[int, list[Tensor]] = {}
        for name, piece in self._pieces():
            by_replicas.setdefault(self._trainable.tp_replicas(name), []).append(piece)
        return shared_squares(by_replicas, self._device)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies this rank's parts by `factor`."""
        for _, piece in self._pieces():
            piece.mul_(factor.to(piece.device, piece.dtype))

    def _pieces(self) -> Iterator[tuple[str, Tensor]]:
        """Yields this rank's averaged gradients: (name, flat run of the tensor's elements)."""
        zero = self._zero
        for i, group in enumerate(zero.fp16_groups):
            if self._plan.optimizer_offload:
                flat = zero.fp32_partitioned_groups_flat[i].grad
                for parameter in group:
                    _, begin, numel = zero.grad_position[zero.get_param_id(parameter)]
                    yield self._names[parameter], flat.narrow(0, begin, numel)
            else:
                for parameter, piece in zip(group, zero.averaged_gradients[i], strict=True):
                    yield self._names[parameter], piece

    def step(self, learning_rate: float) -> None:
        """Updates this rank's part; the next forward gathers the new weights."""
        for group in self._zero.optimizer.param_groups:
            group["lr"] = learning_rate
        self._zero.step()
        self._zero.zero_grad(set_to_none=True)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the moments of this rank's flat parts."""
        return {
            f"group{i}": {k: v for k, v in self._zero.optimizer.state[p].items() if v.ndim}
            for i, p in enumerate(self._zero.fp32_partitioned_groups_flat)
            if p in self._zero.optimizer.state
        }

    def state_parts(self) -> Iterator[StatePart]:
        """Yields what this rank's flat parts hold of each weight."""
        parts: Iterator[StatePart] = self._zero.optimizer.state_parts()
        return parts

    def weights_loaded(self) -> None:
        """Makes this rank's parts of the weights, which the next forward gathers."""
        for i in range(len(self._zero.fp32_partitioned_groups_flat)):
            self._zero._reassign_or_swap_out_partitioned_parameters(i)

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the weights, gathered one by one."""
        for name, parameter in self._trainable.parameters.items():
            with internals.gathered(parameter):
                yield name, parameter.detach().clone()

    def weight_bytes(self) -> int:
        """Returns the bytes of this rank's part of the weights."""
        return 0 if self._plan.parameter_offload else self._part() * self._dtype.itemsize

    def gradient_bytes(self) -> int:
        """Returns the bytes of this rank's sums of gradients, fp32."""
        return 0 if self._plan.optimizer_offload else self._part() * 4

    def optimizer_bytes(self) -> int:
        """Returns the bytes of moments and of master copies that are not the weights."""
        return 0 if self._plan.optimizer_offload else self._state_bytes()

    def host_bytes(self) -> int:
        """Returns the bytes of weights, sums of gradients and optimizer state on the host."""
        weights = self._part() * self._dtype.itemsize if self._plan.parameter_offload else 0
        sums = 2 * self._part() * 4  # as they are summed, and for the optimizer
        return weights + (sums + self._state_bytes() if self._plan.optimizer_offload else 0)

    def _part(self) -> int:
        return sum(t.numel() for t in self._zero.fp32_partitioned_groups_flat)

    def _state_bytes(self) -> int:
        moments = [t for state in self.optimizer_state().values() for t in state.values()]
        weights = {t.untyped_storage().data_ptr() for t in self._zero.fp16_partitioned_groups_flat}
        masters = [
            p
            for p in self._zero.fp32_partitioned_groups_flat
            if p.untyped_storage().data_ptr() not in weights
        ]
        return tensor_bytes([*moments, *masters])
