"""How a group of ranks lies on the nodes: which part of its traffic stays inside a node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flopwright.ops import Array


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A group's layout; arrays broadcast over candidates.

    Attributes:
        size: ranks of the group.
        local: ranks of the group on one node; size / local is the number of nodes.
    """

    size: Array
    local: Array

    @property
    def nodes(self) -> Array:
        """Nodes the group spans."""
        return np.asarray(np.ceil(self.size / self.local))

    @property
    def spans(self) -> Array:
        """Whether the group leaves its node."""
        return np.asarray(self.local < self.size)


def group_shape(size: ArrayLike, stride: ArrayLike, gpus_per_node: int) -> GroupShape:
    """Returns the layout of a group of `size` ranks that stand `stride` apart.

    Ranks are laid out tp fastest (plan/mesh.py), node after node, so a group of stride s
    has floor(gpus_per_node / s) members on a node, at least one and at most all.
    """
    total, apart = np.asarray(size, float), np.asarray(stride, float)
    local = np.clip(np.floor(gpus_per_node / apart), 1.0, total)
    return GroupShape(size=total, local=np.asarray(local))
