"""Which ranks form which group: one place for simulator and executor.

Ranks are laid out with tp fastest, then cp, dp_shard, dp_replicate and pp slowest, so that
the chattiest groups are neighbours. Experts borrow ranks: an expert group is a run of `ep`
neighbours inside one pipeline stage's dp_shard * cp * tp ranks; where etp ranks cut an
expert, they are the neighbours, and the expert group takes every etp-th rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.plan.parallel import ParallelPlan

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")  # slowest first


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a plan as an array indexed by (pp, dp_replicate, dp_shard, cp, tp)."""

    plan: ParallelPlan

    @property
    def ranks(self) -> NDArray[np.int64]:
        """All ranks, shaped by the axes."""
        p = self.plan
        return np.arange(p.world_size).reshape(p.pp, p.dp_replicate, p.dp_shard, p.cp, p.tp)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the rank's index on every axis, and its `dp` and `ep` index."""
        index = np.unravel_index(rank, self.ranks.shape)
        out = {axis: int(i) for axis, i in zip(AXES, index, strict=True)}
        out["dp"] = out["dp_replicate"] * self.plan.dp_shard + out["dp_shard"]
        inside = rank % (self.plan.dp_shard * self.plan.cp * self.plan.tp)
        out["ep"] = inside // self.plan.etp % self.plan.ep
        return out

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """Returns every group of the given name as rank tuples.

        Names: pp, dp_replicate, dp_shard, dp (replicate and shard), tp, cp, dp_cp (the ranks
        of a stage that hold the same dense weights, but for tp's whole tensors), dp_shard_cp
        (those of them in one replica), ep, etp, edp (the ranks that hold the same parts of the
        same experts), edp_shard (those of them in one replica), world. Every rank stands in
        exactly one group of each name.
        """
        p, ranks = self.plan, self.ranks
        if name == "world":
            table = ranks.reshape(1, -1)
        elif name == "dp":
            table = np.moveaxis(ranks, (1, 2), (-2, -1)).reshape(-1, p.dp)
        elif name == "dp_cp":
            table = np.moveaxis(ranks, 4, 1).reshape(-1, p.dp * p.cp)
        elif name == "dp_shard_cp":
            table = np.moveaxis(ranks, 4, 2).reshape(-1, p.dp_shard * p.cp)
        elif name in {"ep", "etp", "edp", "edp_shard"}:
            stage = ranks.reshape(p.pp, p.dp_replicate, -1, p.ep, p.etp)
            if name == "etp":
                table = stage.reshape(-1, p.etp)
            elif name == "ep":
                table = np.moveaxis(stage, 3, 4).reshape(-1, p.ep)
            elif name == "edp_shard":
                table = np.moveaxis(stage, 2, 4).reshape(-1, stage.shape[2])
            else:
                table = np.moveaxis(stage, (3, 4), (1, 2)).reshape(p.pp * p.ep * p.etp, -1)
        else:
            axis = AXES.index(name)
            table = np.moveaxis(ranks, axis, -1).reshape(-1, ranks.shape[axis])
        return tuple(tuple(int(r) for r in row) for row in table)

    def group_of(self, name: str, rank: int) -> tuple[int, ...]:
        """Returns the group of that name in which `rank` stands."""
        return next(g for g in self.groups(name) if rank in g)
