"""Candidates of one pipeline that are alike in what a part of their costs depends on.

A few hundred kinds stand for thousands of plans: what a micro-batch costs does not depend on
where the optimizer's state lives, nor the end of a step on what is made again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.training.candidates import Candidates, Ints, distinct
from flopwright.simulator.training.combos import ShardCombos


@dataclass(frozen=True, slots=True)
class Alike:
    """One candidate of every kind.

    Attributes:
        candidates: the first of each kind, (K,); combos: with their `index`.
        first: where they stand among all, (K,); of: which kind each candidate is, (C,).
    """

    candidates: Candidates
    combos: ShardCombos
    first: Ints
    of: Ints

    def spread(self, values: Array) -> Array:
        """Returns values of kinds, (..., K), as those of candidates, (..., C)."""
        return values[..., self.of]


def alike_in_micro_batch(c: Candidates, combos: ShardCombos) -> Alike:
    """Returns the kinds of micro-batches: what layers cost, keep, send and copy, how many run.

    Up to ZeRO stage 1 nothing of the optimizer happens inside a micro-batch.
    """
    cut = np.where(c.zero_stage >= 2, c.zero_stage, 0)
    policy = (c.recompute, c.recompute_tags, c.fp8_activations)
    offload = (c.activation_offload, c.gradient_offload, c.parameter_offload)
    return _alike(c, combos, c.dp_replicate, c.dp_shard, cut, *policy, *offload)


def alike_on_a_rank(c: Candidates, combos: ShardCombos) -> Alike:
    """Returns the kinds of what a rank holds, exchanges and updates once a step."""
    offload = (c.optimizer_offload, c.gradient_offload, c.parameter_offload)
    return _alike(c, combos, c.dp_replicate, c.dp_shard, c.zero_stage, *offload)


def _alike(c: Candidates, combos: ShardCombos, *axes: Ints) -> Alike:
    first, of = distinct(combos.index, *axes)
    few = replace(combos, index=combos.index[first])
    return Alike(candidates=c.take(first), combos=few, first=first, of=of)
