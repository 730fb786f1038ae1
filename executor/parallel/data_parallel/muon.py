"""Whole matrices for Muon, whatever a rank holds of them: the Muon of a part is no part of Muon.

Each matrix has one owner among the ranks that hold it: the one with most of it, and among
equals the one with least to do so far. The others send it their parts of the update, in the
format of the iteration; it orthogonalises and sends the results back: one all-to-all each
way over the ranks that cut optimizer state, and one over those of tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.data_parallel.muon_cuts import Held
from flopwright.executor.parallel.groups import Group, Groups
from flopwright.models.optim.muon.cost import newton_schulz_flops
from flopwright.models.optim.muon.layout import MatrixLayout
from flopwright.models.optim.muon.module import orthogonalise

# Numbers of whole tensors under way at once: more would only cost memory.
BATCH_NUMBERS: Final = 2**28


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix (or this rank's tensor-parallel slice of it) and who holds what of it.

    Attributes:
        held: which of the batch's tensors it is in.
        start: this rank's first element of it, in its part of that tensor.
        sizes: elements of it by rank; consecutive runs.
    """

    held: int
    rows: int
    columns: int
    layout: MatrixLayout
    start: int
    sizes: tuple[int, ...]


@dataclass(slots=True)
class Orthogonaliser:
    """Newton-Schulz over the matrices of held parts; collective over the ranks that hold them."""

    layouts: Mapping[str, MatrixLayout]
    groups: Groups
    timer: ActionTimer
    _matrices: dict[tuple[str, ...], list[_Matrix]] = field(default_factory=dict)

    def batches(self, held: Sequence[Held]) -> Iterator[list[int]]:
        """Yields runs of positions in `held` to treat together, of one group each."""
        batch: list[int] = []
        numbers = 0
        for i, part in enumerate(held):
            numel = max(end for _, end in part.bounds)
            other = batch and part.group.ranks != held[batch[0]].group.ranks
            if batch and (other or numbers + numel > BATCH_NUMBERS):
                yield batch
                batch, numbers = [], 0
            batch.append(i)
            numbers += numel
        if batch:
            yield batch

    def __call__(self, held: Sequence[Held], updates: Sequence[Tensor]) -> list[Tensor]:
        """Returns this rank's parts of the orthogonalised matrices, flat like `updates`.

        Args:
            held: parts of one group's tensors.
            updates: their elements, flat, in the dtype to iterate in.
        """
        group = held[0].group
        matrices = self._split(held)
        parts = [updates[m.held][m.start : m.start + m.sizes[group.index]] for m in matrices]
        own = _Owners.among(group, [m.sizes for m in matrices], [_flops(m) for m in matrices])
        gathered = own.gather(parts, self.timer, "dp_comm")
        mine = [matrices[i] for i in own.mine]
        local = [_joined(p).view(m.rows, m.columns) for m, p in zip(mine, gathered, strict=True)]
        results = self._whole(mine, local)
        answers = [
            list(torch.split(result.reshape(-1), list(m.sizes)))
            for m, result in zip(mine, results, strict=True)
        ]
        back = own.scatter(answers, parts, self.timer, "dp_comm")
        out: list[list[Tensor]] = [[] for _ in held]
        for matrix, part in zip(matrices, back, strict=True):
            out[matrix.held].append(part)
        return [_joined(pieces) if pieces else u for pieces, u in zip(out, updates, strict=True)]

    def _whole(self, matrices: Sequence[_Matrix], local: Sequence[Tensor]) -> list[Tensor]:
        """Returns Newton-Schulz of matrices of which each rank of an axis has a slice."""
        out = list(local)
        for axis in ("", "tp", "etp"):
            at = [i for i, m in enumerate(matrices) if m.layout.axis == axis]
            slices = [local[i] for i in at]
            if axis:
                layouts = [matrices[i].layout for i in at]
                results = self._over(getattr(self.groups, axis), layouts, slices)
            else:
                results = orthogonalise(slices)
            for i, result in zip(at, results, strict=True):
                out[i] = result
        return out

    def _over(
        self, group: Group, layouts: Sequence[MatrixLayout], slices: Sequence[Tensor]
    ) -> list[Tensor]:
        if not slices:
            return []
        sizes = [(s.numel(),) * group.size for s in slices]
        flops = [newton_schulz_flops(s.shape[0], s.shape[1] * group.size) for s in slices]
        own = _Owners.among(group, sizes, flops)
        parts = [s.reshape(-1) for s in slices]
        gathered = own.gather(parts, self.timer, "tp_comm")
        whole = [
            torch.cat([p.view(slices[i].shape) for p in pieces], layouts[i].dim)
            for i, pieces in zip(own.mine, gathered, strict=True)
        ]
        answers = [
            [piece.reshape(-1) for piece in result.chunk(group.size, layouts[i].dim)]
            for i, result in zip(own.mine, orthogonalise(whole), strict=True)
        ]
        back = own.scatter(answers, parts, self.timer, "tp_comm")
        return [b.view(s.shape) for b, s in zip(back, slices, strict=True)]

    def _split(self, held: Sequence[Held]) -> list[_Matrix]:
        key = tuple(part.name for part in held)
        if key not in self._matrices:
            self._matrices[key] = [
                matrix for i, part in enumerate(held) for matrix in self._of(i, part)
            ]
        return self._matrices[key]

    def _of(self, index: int, part: Held) -> Iterator[_Matrix]:
        layout = self.layouts[part.name]
        rows, columns = part.shape[-2] // layout.parts, part.shape[-1]
        size, first = rows * columns, part.run[0]
        for begin in range(0, max(end for _, end in part.bounds), size):
            inside = [_overlap(bounds, begin, begin + size) for bounds in part.bounds]
            yield _Matrix(
                held=index,
                rows=rows,
                columns=columns,
                layout=layout,
                start=max(0, begin - first),
                sizes=tuple(inside),
            )


@dataclass(frozen=True, slots=True)
class _Owners:
    """Who orthogonalises which matrix of a list, and the messages that follow from it."""

    group: Group
    owner: tuple[int, ...]
    sizes: Sequence[tuple[int, ...]]

    @classmethod
    def among(
        cls, group: Group, sizes: Sequence[tuple[int, ...]], flops: Sequence[float]
    ) -> _Owners:
        """Returns owners that are the same on every rank."""
        load = [0.0] * group.size
        owner = []
        for held, work in zip(sizes, flops, strict=True):
            most = max(held)
            best = min((r for r in range(group.size) if held[r] == most), key=load.__getitem__)
            load[best] += work
            owner.append(best)
        return cls(group, tuple(owner), sizes)

    @property
    def mine(self) -> list[int]:
        """Positions of the matrices that this rank owns."""
        return [i for i, owner in enumerate(self.owner) if owner == self.group.index]

    def gather(self, parts: Sequence[Tensor], timer: ActionTimer, cls: str) -> list[list[Tensor]]:
        """Sends this rank's parts to their owners; returns for each own matrix all parts."""
        if self.group.size == 1:
            return [[part] for part in parts]
        ranks = range(self.group.size)
        sent = [
            [p for p, owner in zip(parts, self.owner, strict=True) if owner == r] for r in ranks
        ]
        sizes = [[self.sizes[i][r] for i in self.mine] for r in ranks]
        arrived = _exchange(sent, sizes, parts[0], self.group, timer, ("muon_gather", cls))
        return [list(pieces) for pieces in zip(*arrived, strict=True)]

    def scatter(
        self,
        answers: Sequence[Sequence[Tensor]],
        parts: Sequence[Tensor],
        timer: ActionTimer,
        cls: str,
    ) -> list[Tensor]:
        """Sends each rank its parts of the own matrices; returns this rank's of all."""
        if self.group.size == 1:
            return [answer[0] for answer in answers]
        me, ranks = self.group.index, range(self.group.size)
        sent = [[answer[r] for answer in answers] for r in ranks]
        sizes = [
            [s[me] for s, owner in zip(self.sizes, self.owner, strict=True) if owner == r]
            for r in ranks
        ]
        arrived = _exchange(sent, sizes, parts[0], self.group, timer, ("muon_scatter", cls))
        iterators = [iter(a) for a in arrived]
        return [next(iterators[owner]) for owner in self.owner]


def _exchange(
    sent: Sequence[Sequence[Tensor]],
    sizes: Sequence[Sequence[int]],
    like: Tensor,
    group: Group,
    timer: ActionTimer,
    action: tuple[str, str],
) -> list[list[Tensor]]:
    """All-to-all of lists of flat tensors: sent[r] goes to rank r, sizes[r] come from it."""
    flat = [piece for row in sent for piece in row]
    message = torch.cat(flat) if flat else like.new_empty(0)
    arrived = like.new_empty(sum(map(sum, sizes)))
    with timer.action(*action, message.numel() * message.element_size()):
        dist.all_to_all_single(
            arrived,
            message,
            [sum(row) for row in sizes],
            [sum(p.numel() for p in row) for row in sent],
            group=group.handle,
        )
    rows = torch.split(arrived, [sum(row) for row in sizes])
    return [
        list(torch.split(a, list(row))) if row else [] for a, row in zip(rows, sizes, strict=True)
    ]


def _flops(matrix: _Matrix) -> float:
    return newton_schulz_flops(matrix.rows, matrix.columns)


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))


def _overlap(bounds: tuple[int, int], begin: int, end: int) -> int:
    return max(0, min(bounds[1], end) - max(bounds[0], begin))
