"""Whole tensors of the parts that tensor-parallel ranks hold, as a checkpoint has them."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from flopwright.executor.parallel.groups import Group, Groups
from flopwright.models.slices import joined
from flopwright.plan.sharding import Cut, tensor_cuts
from flopwright.spec.parameters import ParamTensor


def joined_tensor(tensor: Tensor, param: ParamTensor, groups: Groups) -> Tensor:
    """Returns a rank's tensor with what tp and etp cut put together; its experts stay its own.

    Collective over the tp group, or the etp group for experts.

    Args:
        tensor: this rank's part of `param`.
    """
    for cut in tensor_cuts(param):
        group = {"tp": groups.tp, "etp": groups.etp}.get(cut.axis)
        if group is not None and group.size > 1:
            tensor = _gathered(tensor, cut, param.shape[cut.dim], group)
    return tensor


def _gathered(tensor: Tensor, cut: Cut, length: int, group: Group) -> Tensor:
    """Returns the tensor of which the ranks of `group` hold parts, padded on their way."""
    lengths = [
        sum(stop - start for start, stop in cut.ranges(length, group.size, rank))
        for rank in range(group.size)
    ]
    rows = tensor.movedim(cut.dim, 0).contiguous()
    padded = rows.new_zeros((max(lengths), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    everything = padded.new_empty((group.size * padded.shape[0], *padded.shape[1:]))
    dist.all_gather_single(everything, padded, group=group.handle)
    parts = [
        part[:count].movedim(0, cut.dim)
        for part, count in zip(everything.chunk(group.size), lengths, strict=True)
    ]
    return joined(parts, cut)
