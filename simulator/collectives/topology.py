"""How a group of ranks lies on the nodes: which part of its traffic stays inside a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array

# A quotient such as 7 / (7 / 3) may come out a last digit above its whole number.
_ROUNDING: Final = 1e-9


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group's layout; arrays broadcast over candidates. A node here is an NVLink domain.

    Attributes:
        size: ranks of the group.
        local: ranks of the group on one node; size / local is the number of nodes. Where a
            node holds fewer than another, this is the mean.
    """

    size: Array
    local: Array

    @property
    def nodes(self) -> Array:
        """Nodes the group spans."""
        return np.asarray(np.ceil(self.size / self.local - _ROUNDING))

    @property
    def spans(self) -> Array:
        """Whether the group leaves its node."""
        return np.asarray(self.local < self.size)


def group_shape(size: ArrayLike, stride: ArrayLike, gpus_per_node: int) -> GroupShape:
    """Returns the layout of a group of `size` ranks that stand `stride` apart.

    Ranks are laid out tp fastest (plan/mesh.py), node after node, so a group of stride s
    has up to floor(gpus_per_node / s) members on a node, at least one and at most all. It
    takes as few nodes as that allows, evenly filled: a job of 128 GPUs on NVL72 racks is
    given 64 of each, not 72 and 56.

    Args:
        gpus_per_node: GPUs of one NVLink domain (NodeSpec.domain_gpus).
    """
    total, apart = np.asarray(size, float), np.asarray(stride, float)
    most = np.clip(np.floor(gpus_per_node / apart), 1.0, total)
    return GroupShape(size=total, local=np.asarray(total / np.ceil(total / most)))
