"""Sums of layer tables over the layers of chunks, for each candidate's shape and policy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.training.blocks import BlockTable

Classes = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picker:
    """The tables of a model's layer kinds, seen from candidates with one pipeline.

    Attributes:
        kinds: layers of each kind in each chunk, (kinds, chunks).
        again: those of them under each candidate's recompute policy, the others keep all;
            None where the policy holds for all.
        policy, column: which policy and combination each candidate has, (C,).
        stages: chunks by (place on the stage, stage); round: whether they are in order.
    """

    kinds: NDArray[np.int64]
    again: NDArray[np.int64] | None
    tables: tuple[BlockTable, ...]
    policy: NDArray[np.int64]
    column: NDArray[np.int64]
    stages: NDArray[np.int64]
    round: bool

    def sum(self, columns: list[Array], counts: NDArray[np.int64] | None = None) -> Array:
        """Returns sum over kinds of count (kinds, chunks) times values (C,): (chunks, C)."""
        counts = self.kinds if counts is None else counts
        return np.asarray(counts.T.astype(float) @ np.stack(columns))

    def plain(self, columns: list[Array]) -> Array:
        """Returns tables (U,) that no policy changes, summed over layers, (chunks, C)."""
        return self.sum([c[self.column] for c in columns])

    def ruled(self, columns: list[Array]) -> Array:
        """Returns tables (R, U) that depend on the policy, summed over layers, (chunks, C)."""
        chosen = [c[self.policy, self.column] for c in columns]
        if self.again is None:
            return self.sum(chosen)
        others = [c[0, self.column] for c in columns]
        return self.sum(chosen, self.again) + self.sum(others, self.kinds - self.again)

    def of(self, name: str) -> Array:
        """Returns the field `name` of the tables, summed over layers, (chunks, C)."""
        columns = [getattr(t, name) for t in self.tables]
        return self.plain(columns) if columns[0].ndim == 1 else self.ruled(columns)

    def classes(self, name: str) -> Classes:
        """Returns a field that has seconds by class, summed over layers."""
        every = [getattr(t, name) for t in self.tables]
        out = {}
        for cls in dict.fromkeys(c for table in every for c in table):
            some = next(t[cls] for t in every if cls in t)
            columns = [t.get(cls, np.zeros_like(some)) for t in every]
            out[cls] = self.plain(columns) if some.ndim == 1 else self.ruled(columns)
        return out

    def by_stage(self, values: Array) -> Array:
        """Returns values by chunk summed over the chunks of each stage, (pp, C)."""
        vpp, pp = self.stages.shape
        if self.round:
            return values if vpp == 1 else values.reshape(vpp, pp, -1).sum(axis=0)
        return np.asarray(values[self.stages].sum(axis=0))

    def params(self) -> ParamCounts:
        """Returns the numbers a rank of each stage holds."""
        names = ("held", "dense", "dense_matrix", "expert")
        sums = {
            n: self.by_stage(self.plain([getattr(t.params, n) for t in self.tables]))
            for n in names
        }
        return ParamCounts(**sums)

    def fullest_backward(self, tied: Array) -> Array:
        """Returns the most bytes a chunk's backward holds at once beyond what it kept.

        It runs from the head down, and what a layer kept is gone once it is done.

        Args:
            tied: bytes of the shared table's gradient, (C,): the head's waits for the
                embedding's where one chunk holds both.
        """
        column, policy = self.column, self.policy
        needs = np.stack(
            [t.recomputed_bytes[policy, column] + t.temporary_bytes[column] for t in self.tables]
        )
        kept = np.stack([(t.saved_bytes + t.saved_fp8_bytes)[policy, column] for t in self.tables])
        present = (self.kinds > 0)[:, :, None]
        layers = np.where(present, needs[:, None, :], 0.0)[1:-1].max(axis=0, initial=0.0)
        whole = self.kinds.T.astype(float) @ kept
        table = np.where(present[0], needs[0] - whole, -np.inf)
        after = np.maximum(layers - present[-1] * kept[-1], table)
        after = after + np.where(present[0] & present[-1], tied, 0.0)
        return np.asarray(np.maximum(after, present[-1] * needs[-1]).clip(0.0))


def first_layers(kinds: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Returns how many layers of each kind are among the first `limit` of each chunk.

    Layers stand in the order of their kinds; the embedding and the head are no layers.
    """
    out = np.zeros_like(kinds)
    left = np.full(kinds.shape[1], limit)
    for kind in range(1, len(kinds) - 1):
        out[kind] = np.minimum(kinds[kind], left)
        left = left - out[kind]
    return out
