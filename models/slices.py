"""A rank's part of a whole tensor, and the whole of the ranks' parts (plan/sharding.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flopwright.plan.sharding import Axis, Cut

Places = Mapping[Axis, tuple[int, int]]  # ranks of the group, and this rank's index in it


def own_part(whole: Tensor, cuts: Sequence[Cut], places: Places) -> Tensor:
    """Returns what the rank at `places` holds of a tensor that is cut by `cuts`."""
    for cut in cuts:
        size, index = places[cut.axis]
        if size > 1:
            ranges = cut.ranges(whole.shape[cut.dim], size, index)
            parts = [whole.narrow(cut.dim, start, stop - start) for start, stop in ranges]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
    return whole


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """Returns the tensor of which the ranks of a group hold `parts`, in the group's order."""
    by_block = [part.chunk(cut.blocks, cut.dim) for part in parts]
    return torch.cat([p[b] for b in range(cut.blocks) for p in by_block], cut.dim)
