"""Which process groups a rank stands in, built from the plan's mesh.

Several plans run in one launch, so groups are shared by rank set and purpose: every rank
must build the plans in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.plan.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Group:
    """One group as its member sees it.

    Attributes:
        ranks: global ranks, in group order.
        index: this rank's place in the group.
        handle: torch's process group.
    """

    ranks: tuple[int, ...]
    index: int
    handle: Any

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sums `tensor` over the group in place and returns it; a group of one sends nothing."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.handle)
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of one rank under one plan (plan/mesh.py names them).

    Attributes:
        dp_cp: the ranks over which dense gradients are summed: all of a stage with the same tp
            index, which is `dp_shard` (its dp_shard and cp axes) in each of `dp_replicate`.
        edp: the ranks over which an expert's gradients are summed, which is `edp_shard` in each
            of `dp_replicate`.
        pp_forward, pp_backward: the same ranks twice. Activations and gradients cross each
            other between two stages, and NCCL runs the messages of one communicator in
            order: with a single one, two stages that both send first would wait forever.
        pp_forward_up, pp_backward_down: once more, for activations that go to an earlier stage
            and gradients that go to a later one, as they do where a stage holds several chunks.
    """

    world: Group
    dp: Group
    tp: Group
    cp: Group
    dp_cp: Group
    dp_shard: Group
    dp_replicate: Group
    ep: Group
    etp: Group
    edp: Group
    edp_shard: Group
    pp_forward: Group
    pp_backward: Group
    pp_forward_up: Group
    pp_backward_down: Group
    coordinates: dict[str, int]


@dataclass(slots=True)
class GroupRegistry:
    """Process groups by (purpose, ranks), made once.

    Attributes:
        timeout: after which an operation of a group fails; None takes torch's.
    """

    timeout: timedelta | None = None
    _made: dict[tuple[str, tuple[int, ...]], Any] = field(default_factory=dict)

    def build(self, mesh: Mesh) -> Groups:
        """Returns this rank's groups; collective: every rank calls it with the same mesh."""
        several = mesh.plan.vpp > 1
        return Groups(
            world=self._member(mesh, "world", "world"),
            dp=self._member(mesh, "dp", "dp"),
            tp=self._member(mesh, "tp", "tp"),
            cp=self._member(mesh, "cp", "cp"),
            dp_cp=self._member(mesh, "dp_cp", "dp_cp"),
            dp_shard=self._member(mesh, "dp_shard_cp", "dp_shard"),
            dp_replicate=self._member(mesh, "dp_replicate", "dp_replicate"),
            ep=self._member(mesh, "ep", "ep"),
            etp=self._member(mesh, "etp", "etp"),
            edp=self._member(mesh, "edp", "edp"),
            edp_shard=self._member(mesh, "edp_shard", "edp_shard"),
            pp_forward=self._member(mesh, "pp", "pp_forward"),
            pp_backward=self._member(mesh, "pp", "pp_backward"),
            # With one chunk a stage nothing goes that way.
            pp_forward_up=self._member(mesh, "pp", "pp_forward_up" if several else "pp_forward"),
            pp_backward_down=self._member(
                mesh, "pp", "pp_backward_down" if several else "pp_backward"
            ),
            coordinates=mesh.coordinates(dist.get_rank()),
        )

    def _member(self, mesh: Mesh, name: str, purpose: str) -> Group:
        rank, mine = dist.get_rank(), None
        for ranks in mesh.groups(name):
            if len(ranks) == 1 and rank not in ranks:
                continue
            handle = self._handle(purpose, ranks)
            if rank in ranks:
                mine = Group(ranks, ranks.index(rank), handle)
        assert mine is not None, f"rank {rank} stands in no {name} group"
        return mine

    def _handle(self, purpose: str, ranks: tuple[int, ...]) -> Any:
        if purpose == "world":
            return dist.group.WORLD
        # Data-parallel groups over the same ranks may share a communicator; the two
        # directions of a pipeline may not.
        key = (purpose if purpose.startswith("pp") else "shared", ranks)
        if key not in self._made:
            # Nobody else has to know of a rank that stands alone.
            alone = len(ranks) == 1
            self._made[key] = dist.new_group(
                list(ranks), timeout=self.timeout, use_local_synchronization=alone
            )
        return self._made[key]


def gather_bytes(data: bytes, group: Group, device: torch.device) -> list[bytes]:
    """Returns every rank's bytes, in rank order (tensors only: no pickled objects travel)."""
    if group.size == 1:
        return [data]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in group.ranks]
    dist.all_gather(
        sizes, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group.handle
    )
    longest = max(int(s) for s in sizes)
    mine = torch.zeros(longest, dtype=torch.uint8, device=device)
    mine[: len(data)] = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).to(device)
    rows = [torch.empty_like(mine) for _ in group.ranks]
    dist.all_gather(rows, mine, group=group.handle)
    return [bytes(row[: int(size)].cpu().numpy()) for row, size in zip(rows, sizes, strict=True)]
