"""Which part of which tensor a rank owns: priced by the simulator, built by the executor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import EMBEDDING_LAYER, ParamTensor, layer_parameters

Axis = Literal["tp", "ep", "etp"]

# Roles that tensor parallelism splits; norms, routers and MLA's latent down-projections
# and those of gates, indexers, and the experts' latent width stay whole on every rank.
_TP_SPLIT_ROLES = frozenset({"embedding", "mlp", "shared_expert", "head", "attention", "channel"})
_TP_WHOLE_NAMES = ("q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "g_a_proj", ".indexer.")
# Matrices whose inputs are cut; their biases are added once, after the sum.
_CUT_ALONG_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a tensor is cut over the ranks of a group, in the group's order.

    Attributes:
        dim: the dimension that is cut.
        axis: the group, by its name in plan/mesh.py.
        blocks: equal blocks that stand behind each other along `dim` and are each cut alike: 2
            for an expert's gate and up in one tensor.
    """

    dim: int
    axis: Axis
    blocks: int = 1

    def ranges(self, length: int, size: int, index: int) -> tuple[tuple[int, int], ...]:
        """Returns the parts (start, stop) of `length` along `dim` of rank `index` of `size`.

        One a block. Where size does not divide a block the last ranks hold less.
        """
        block = length // self.blocks
        part = -(-block // size)
        start, stop = min(index * part, block), min((index + 1) * part, block)
        return tuple((i * block + start, i * block + stop) for i in range(self.blocks))


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnedTensor:
    """One rank's part of a tensor: its elements, and over how many ranks it is replicated."""

    param: ParamTensor
    numel: int
    replicas: int

    @property
    def expert(self) -> bool:
        """Whether its gradient is reduced over the expert-data-parallel group."""
        return self.param.role == "expert"


def tensor_cuts(param: ParamTensor) -> tuple[Cut, ...]:
    """Returns how the groups of a plan cut a tensor, whatever their sizes."""
    leaf = param.name.rsplit(".", 2)
    if param.role == "expert" and param.is_bias:
        inside = Cut(dim=1, axis="etp", blocks=2)
        return (Cut(dim=0, axis="ep"), *((inside,) if "gate_up" in leaf[-1] else ()))
    if param.role == "expert":
        gate_up = leaf[-1] == "gate_up_proj"
        inner = Cut(dim=1, axis="etp", blocks=2) if gate_up else Cut(dim=2, axis="etp")
        return (Cut(dim=0, axis="ep"), inner)
    if param.role not in _TP_SPLIT_ROLES or any(n in param.name for n in _TP_WHOLE_NAMES):
        return ()
    if leaf[-2] in _CUT_ALONG_INPUTS:
        return () if leaf[-1] == "bias" else (Cut(dim=1, axis="tp"),)
    return (Cut(dim=0, axis="tp"),)


def axis_sizes(plan: ParallelPlan) -> dict[Axis, int]:
    """Returns the ranks of each group that cuts tensors."""
    return {"tp": plan.tp, "ep": plan.ep, "etp": plan.etp}


def cuts(param: ParamTensor, plan: ParallelPlan) -> tuple[Cut, ...]:
    """Returns how a plan cuts a tensor, groups of one rank left out."""
    sizes = axis_sizes(plan)
    return tuple(cut for cut in tensor_cuts(param) if sizes[cut.axis] > 1)


def local_shape(
    param: ParamTensor, sizes: Mapping[Axis, int], index: Mapping[Axis, int]
) -> tuple[int, ...]:
    """Returns the shape of the part that the ranks at `index` of their groups hold."""
    shape = list(param.shape)
    for cut in tensor_cuts(param):
        parts = cut.ranges(shape[cut.dim], sizes[cut.axis], index[cut.axis])
        shape[cut.dim] = sum(stop - start for start, stop in parts)
    return tuple(shape)


def tensor_split(param: ParamTensor, plan: ParallelPlan) -> int:
    """Returns over how many ranks of a stage one copy is cut (tp; ep * etp for experts)."""
    return math.prod(axis_sizes(plan)[cut.axis] for cut in tensor_cuts(param))


def stage_tensors(spec: ModelSpec, plan: ParallelPlan, stage: int) -> tuple[ParamTensor, ...]:
    """Returns the tensors held by pipeline stage `stage`, in model order."""
    layers = list(plan.stage_layers(spec.num_layers)[stage])
    if stage == 0:
        layers.insert(0, EMBEDDING_LAYER)
    if stage == stage_of_chunk(plan, plan.num_chunks - 1):
        # As a stage's module has them: prediction modules are layers, norm and head stand last.
        layers.extend(range(spec.num_layers + 1, spec.num_layers + 1 + spec.mtp_layers))
        layers.append(spec.num_layers)
    return tuple(p for layer in layers for p in layer_parameters(spec, layer))


def owned_tensors(spec: ModelSpec, plan: ParallelPlan, stage: int) -> tuple[OwnedTensor, ...]:
    """Returns what any one rank of `stage` holds before ZeRO: each tensor's local part."""
    out = []
    for param in stage_tensors(spec, plan, stage):
        split = tensor_split(param, plan)
        ranks = plan.dp * plan.cp * plan.tp  # of this stage
        out.append(
            OwnedTensor(param=param, numel=-(-param.numel // split), replicas=ranks // split)
        )
    return tuple(out)
