"""Which elements of which named tensor stand where in what the optimizer updates.

A tensor that the optimizer updates is a whole weight, a master copy of one, a DTensor's
local part, or DeepSpeed's flat partition, which holds the end of one weight, several whole
ones and the beginning of another. In each of them a rank's part of a weight is one run of
the weight's elements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from flopwright.executor.parallel.groups import Group, Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """This rank's part of a weight.

    Attributes:
        name: full parameter name.
        shape: of the weight, after tensor and expert parallelism.
        group: the ranks that together hold it once.
        bounds: by rank of the group, the run (first, end) of its elements, flattened.
        offset: where this rank's run begins in the flattened tensor that is updated.
    """

    name: str
    shape: tuple[int, ...]
    group: Group
    bounds: tuple[tuple[int, int], ...]
    offset: int = 0

    @property
    def run(self) -> tuple[int, int]:
        """The elements that this rank holds: (first, end)."""
        return self.bounds[self.group.index]

    def of(self, flat: Tensor) -> Tensor:
        """Returns this part of the flattened tensor that is updated, a view."""
        first, end = self.run
        return flat[self.offset : self.offset + end - first]


def local(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, flattened, a view."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.view(-1)


def held_by(name: str, parameter: Tensor, alone: Group) -> Held:
    """Returns this rank's part of a parameter: all of it, or a DTensor's rows.

    Args:
        alone: a group of this rank only.
    """
    if not isinstance(parameter, DTensor):
        whole = ((0, parameter.numel()),)
        return Held(name=name, shape=tuple(parameter.shape), group=alone, bounds=whole)
    mesh, placements = parameter.device_mesh, parameter.placements
    cut = [i for i, p in enumerate(placements) if not isinstance(p, Replicate)]
    shape = tuple(parameter.shape)
    if not cut:
        return Held(name=name, shape=shape, group=alone, bounds=((0, parameter.numel()),))
    assert len(cut) == 1, "a weight is cut once"
    assert placements[cut[0]] == Shard(0), "a weight is cut along its first dimension"
    group = _mesh_group(mesh, cut[0])
    each = -(-shape[0] // group.size)  # as torch.chunk: the last ones may be short or empty
    row = parameter.numel() // shape[0]
    bounds = tuple(
        (min(r * each, shape[0]) * row, min((r + 1) * each, shape[0]) * row)
        for r in range(group.size)
    )
    return Held(name=name, shape=shape, group=group, bounds=bounds)


def _mesh_group(mesh: Any, dim: int) -> Group:
    handle = mesh.get_group(dim)
    ranks = tuple(dist.get_process_group_ranks(handle))
    return Group(ranks, dist.get_group_rank(handle, dist.get_rank()), handle)


def deepspeed_partitions(
    zero: Any, names: Mapping[nn.Parameter, str], groups: Groups
) -> dict[Tensor, list[Held]]:
    """Returns what the flat partitions of DeepSpeed's ZeRO-1 and 2 optimizer hold, by partition.

    Args:
        zero: the optimizer; its group i is one flat buffer, cut evenly over the group's ranks.
        names: full names by parameter.
    """
    out: dict[Tensor, list[Held]] = {}
    for i, partition in enumerate(zero.single_partition_of_fp32_groups):
        group = _group_with(zero.real_dp_process_group[i], groups)
        size, held = int(zero.partition_size[i]), []
        offsets = zero.round_robin_bit16_offsets[i]
        for parameter, begin in zip(zero.round_robin_bit16_groups[i], offsets, strict=True):
            numel = parameter.numel()
            bounds = tuple(
                (_within(r * size - begin, numel), _within((r + 1) * size - begin, numel))
                for r in range(group.size)
            )
            held.append(
                Held(
                    name=names[parameter],
                    shape=tuple(parameter.shape),
                    group=group,
                    bounds=bounds,
                    offset=max(0, begin - group.index * size),
                )
            )
        out[partition] = held
    return out


def deepspeed_stage3_partitions(
    zero: Any, names: Mapping[nn.Parameter, str], group: Group
) -> dict[Tensor, list[Held]]:
    """Returns what the flat sub-groups of DeepSpeed's ZeRO-3 optimizer hold, by sub-group.

    Each weight is cut evenly by itself, the last part padded; a sub-group is this rank's parts
    of some weights behind each other.

    Args:
        group: the ranks that weights are cut over.
    """
    out: dict[Tensor, list[Held]] = {}
    for flat, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        held, offset = [], 0
        for parameter in parameters:
            size, numel = int(parameter.partition_numel()), int(parameter.ds_numel)
            bounds = tuple(
                (_within(r * size, numel), _within((r + 1) * size, numel))
                for r in range(group.size)
            )
            shape = tuple(parameter.ds_shape)
            name = names[parameter]
            held.append(Held(name=name, shape=shape, group=group, bounds=bounds, offset=offset))
            offset += size
        out[flat] = held
    return out


def _within(position: int, numel: int) -> int:
    return min(max(position, 0), numel)


def _group_with(handle: Any, groups: Groups) -> Group:
    found = [g for g in (groups.dp_cp, groups.dp_shard, groups.edp, groups.edp_shard, groups.dp)
             if g.handle is handle]  # fmt: skip
    assert found, "a partition is cut over a group of the plan"
    return found[0]
