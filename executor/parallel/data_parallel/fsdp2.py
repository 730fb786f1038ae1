"""ZeRO 1, 2 and 3 and hybrid sharding through torch's FSDP2 (`fully_shard`).

Each transformer layer is one unit that is gathered and reduced as a whole; experts are cut over
the ranks that hold the same experts, everything else over the data- and context-parallel ranks
of one replica. With the lowered list's words (flopwright.plan.lower):

    ZeRO-1   weights are gathered at a chunk's first forward and stay; gradients stay whole and
             are reduced where the list says, after the chunk's last backward
    ZeRO-2   as ZeRO-1, but FSDP2 reduces each unit's gradients inside each backward
    ZeRO-3   and gathers each unit inside each forward and backward, one unit ahead; the list's
             gather starts the first one

What is updated is the shards, in the master copy's precision; weights are cast when gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from flopwright.executor.parallel.data_parallel import fsdp2_internals as internals
from flopwright.executor.parallel.data_parallel.interface import (
    StatePart,
    Trainable,
    numel_bytes,
    shared_squares,
    sum_over_,
    tensor_bytes,
)
from flopwright.executor.parallel.data_parallel.none import ReplicatedDataParallel
from flopwright.executor.parallel.groups import Group
from flopwright.executor.parallel.optimizers import make_optimizer, parameter_groups
from flopwright.models.transformer.module import Stage
from flopwright.plan.parallel import ParallelPlan

# Nothing here changes a stage's output in place, which is what this warns of.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


class FullyShardedDataParallel:
    """FSDP2 over the chunks of a stage."""

    def __init__(self, plan: ParallelPlan, trainable: Trainable) -> None:
        self._stage, self._trainable = plan.zero_stage, trainable
        self._on_host = plan.optimizer_offload
        first = next(iter(trainable.parameters.values()))
        self._device, self._dtype = first.device, first.dtype
        self._wide = trainable.precision.master_weights != "none" and self._dtype.itemsize < 4
        lone = {
            n: p
            for n, p in trainable.parameters.items()
            if trainable.is_expert(n) and trainable.groups.edp_shard.size == 1
        }
        # Experts that no other rank of the replica holds have nothing to be cut over.
        self._lone = tuple(
            ReplicatedDataParallel(
                replace(trainable, parameters=lone, chunks={}), on_host=self._on_host
            )
            for _ in range(min(1, len(lone)))
        )
        self._lone_parameters = set(lone.values())
        self._roots = {c: self._shard(module) for c, module in trainable.chunks.items()}
        self._sums_wide: set[int] = set()
        self._parameters = self._sharded_by_name(lone)
        view = replace(trainable, parameters=self._parameters)
        self._optimizer = make_optimizer(parameter_groups(view), view)

    def _shard(self, chunk: nn.Module) -> FSDPModule:
        trainable = self._trainable
        names = {p: n for n, p in trainable.parameters.items()}
        originals = [
            p for p in chunk.parameters() if p in names and p not in self._lone_parameters
        ]
        if self._wide:
            for parameter in originals:
                parameter.data = parameter.data.float()
        dense = self._mesh(trainable.groups.dp_shard)
        for unit in _units(chunk, apart=self._stage == 3):
            for module in unit.modules():
                if any(p in names and trainable.is_expert(names[p]) for p in _own(module)):
                    self._wrap(module, self._mesh(trainable.groups.edp_shard), expert=True)
            self._wrap(unit, dense)
        root = self._wrap(chunk, dense)
        for parameter in originals:  # FSDP2 has copied its part
            parameter.data = parameter.data.new_empty(0)
        internals.prepare(root)
        if self._stage == 1:
            root.set_is_last_backward(False)
            root.set_requires_gradient_sync(False)
        return root

    def _wrap(
        self, module: nn.Module, mesh: DeviceMesh | None, *, expert: bool = False
    ) -> FSDPModule:
        if mesh is None:
            return module  # type: ignore[return-value]
        cut_again = self._stage == 3
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if self._wide:
            policy = replace(policy, param_dtype=self._dtype, reduce_dtype=torch.float32)
        offload = OffloadPolicy()
        if self._on_host:
            offload = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        wrapped: FSDPModule = fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=cut_again,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=self._lone_parameters,
        )
        # The sum over all ranks first, then one division: as the other backends do.
        wrapped.set_gradient_divide_factor(float(self._trainable.mean_over(expert=expert)))
        wrapped.set_force_sum_reduction_for_comms(True)
        wrapped.set_reshard_after_backward(cut_again, recurse=False)
        return wrapped

    def _mesh(self, shard: Group) -> DeviceMesh | None:
        """Returns the mesh of a replica's shards, with the replicas in front where there are."""
        if shard.size == 1:
            return None
        kind, replicas = self._device.type, self._trainable.groups.dp_replicate
        if replicas.size == 1:
            return DeviceMesh.from_group(shard.handle, kind)
        # Ranks of the replicas lie as far apart as this rank's own replicas do.
        ranks = [[r + other - replicas.ranks[replicas.index] for r in shard.ranks]
                 for other in replicas.ranks]  # fmt: skip
        return DeviceMesh.from_group(
            [replicas.handle, shard.handle],
            kind,
            mesh=torch.tensor(ranks),
            mesh_dim_names=("replicate", "shard"),
        )

    def _sharded_by_name(self, lone: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        found = {}
        for chunk in self._trainable.chunks.values():
            found.update(dict(chunk.named_parameters()))
        return {n: found[n] for n in self._trainable.parameters if n not in lone}

    def gather_weights(self, chunk: int, microbatch: int = -1, bucket: int = -1) -> None:
        """Starts gathering: all of the chunk's units, under ZeRO-3 the one needed first."""
        root = self._roots[chunk]
        if self._stage == 3:
            root.unshard(async_op=True)
            return
        for module in _wrapped(root):
            module.unshard(async_op=True)
        if self._wide and self._stage == 1 and chunk not in self._sums_wide:
            self._sums_wide.add(chunk)
            for module in _wrapped(root):
                module.unshard()  # waits: the hooks need the weights in place
            internals.sum_wide(root)

    def reduce_gradients(self, chunk: int = -1, microbatch: int = -1, bucket: int = -1) -> None:
        """Reduces a chunk's gradients; from ZeRO-2 on FSDP2 has done so in the backward."""
        if self._stage == 1:
            for root in self._roots.values() if chunk < 0 else (self._roots[chunk],):
                internals.reduce_now(root)

    def finish_gradients(self) -> None:
        """Sums what tensor-parallel ranks saw parts of; reduces experts that are not cut."""
        partial = self._trainable.tp_partial_names
        parts = [self._gradient(p) for n, p in self._parameters.items() if n in partial]
        sum_over_(parts, self._trainable.groups.tp, self._device)
        for lone in self._lone:
            lone.reduce_gradients()

    def squared_norm(self) -> Tensor:
        """Returns the squares of this rank's shards; replicas divide what they have in common."""
        trainable, by_replicas = self._trainable, dict[int, list[Tensor]]()
        for name, parameter in self._parameters.items():
            replicas = trainable.groups.dp_replicate.size * trainable.tp_replicas(name)
            by_replicas.setdefault(replicas, []).append(self._gradient(parameter))
        total = shared_squares(by_replicas, self._device)
        for lone in self._lone:
            total += lone.squared_norm()
        return total

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiplies the shards' gradients by `factor`."""
        for parameter in self._parameters.values():
            gradient = self._gradient(parameter)
            gradient.mul_(factor.to(gradient.device, gradient.dtype))
        for lone in self._lone:
            lone.scale_gradients(factor)

    def step(self, learning_rate: float) -> None:
        """Updates this rank's shards; gathered weights are dropped, as they are old now."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        for lone in self._lone:
            lone.step(learning_rate)
        for root in self._roots.values():
            for module in _wrapped(root):
                module.reshard()

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the moments of this rank's shards by parameter name."""
        state = self._optimizer.state
        found: dict[str, Mapping[str, Tensor]] = {
            name: {k: _local(v) for k, v in state[p].items() if v.ndim}
            for name, p in self._parameters.items()
            if p in state
        }
        for lone in self._lone:
            found.update(lone.optimizer_state())
        return found

    def state_parts(self) -> Iterator[StatePart]:
        """Yields what this rank's shards hold of each weight."""
        yield from self._optimizer.state_parts()
        for lone in self._lone:
            yield from lone.state_parts()

    def weights_loaded(self) -> None:
        """Makes what is not sharded anew; shards are cast when they are gathered."""
        for lone in self._lone:
            lone.weights_loaded()

    def full_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor gathered, in the weights' dtype."""
        lone = dict(item for lone in self._lone for item in lone.full_parameters())
        for name in self._trainable.parameters:
            yield name, lone[name] if name in lone else self._gathered(self._parameters[name])

    def _gathered(self, parameter: nn.Parameter) -> Tensor:
        shard = parameter.detach()
        assert isinstance(shard, DTensor)
        if self._on_host and self._device.type != "cpu":
            shard = DTensor.from_local(
                shard.to_local().to(self._device),
                shard.device_mesh,
                shard.placements,
                run_check=False,
                shape=shard.shape,
                stride=shard.stride(),
            )
        return shard.full_tensor().to(self._dtype)

    def weight_bytes(self) -> int:
        """Returns the bytes of gathered weights that stay, and of shards that are no masters."""
        shards = 0 if self._wide or self._on_host else numel_bytes(self._locals())
        whole = 0 if self._stage == 3 else numel_bytes(self._parameters.values(), self._itemsize)
        return whole + shards + sum(x.weight_bytes() for x in self._lone)

    def gradient_bytes(self) -> int:
        """Returns the bytes of whole gradients under ZeRO-1, else of the shards' sums."""
        shards = 0 if self._on_host else numel_bytes(self._locals())
        width = 4 if self._wide else self._itemsize
        whole = numel_bytes(self._parameters.values(), width)
        lone = sum(x.gradient_bytes() for x in self._lone)
        return (whole if self._stage == 1 else shards) + lone

    def optimizer_bytes(self) -> int:
        """Returns the bytes of moments and of shards that are master copies."""
        lone = sum(x.optimizer_bytes() for x in self._lone)
        return lone + (0 if self._on_host else self._state_bytes())

    def host_bytes(self) -> int:
        """Returns the bytes of shards, their gradients and their moments on the host."""
        if not self._on_host:
            return 0
        masters = 0 if self._wide else numel_bytes(self._locals())
        gradients = numel_bytes(self._locals())
        lone = sum(x.host_bytes() for x in self._lone)
        return masters + gradients + self._state_bytes() + lone

    def _state_bytes(self) -> int:
        names = self._parameters.keys()
        moments = [t for n, s in self.optimizer_state().items() if n in names for t in s.values()]
        return tensor_bytes(moments) + (numel_bytes(self._locals()) if self._wide else 0)

    @property
    def _itemsize(self) -> int:
        return self._dtype.itemsize

    def _locals(self) -> Iterator[Tensor]:
        for parameter in self._parameters.values():
            yield _local(parameter)

    def _gradient(self, parameter: nn.Parameter) -> Tensor:
        """Returns the shard's gradient, zeros where nothing made one in this step."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return _local(parameter.grad)


def _units(chunk: nn.Module, *, apart: bool) -> list[nn.Module]:
    """Returns the modules that are gathered as one each: the layers of a stage.

    Args:
        apart: embeddings and head are units of their own too, unless they share a weight.
    """
    if not isinstance(chunk, Stage):
        return list(chunk.children())
    units: list[nn.Module] = list(chunk.blocks())
    if apart and not chunk.spec.tied_embeddings:
        units += [m for m in (chunk.model.embed_tokens, chunk.lm_head) if m is not None]
    return units


def _own(module: nn.Module) -> Iterable[nn.Parameter]:
    return module.parameters(recurse=False)


def _wrapped(root: FSDPModule) -> Iterator[FSDPModule]:
    assert isinstance(root, nn.Module)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            yield module


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
