"""The distinct shard shapes of many plans: thousands of plans share a few dozen."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array, ShardShape
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import CONTEXTS, Candidates, distinct
from flopwright.simulator.training.recompute import STANDARD, Policy, policies_of
from flopwright.simulator.training.routing import busiest_over_mean
from flopwright.spec.scenario import Scenario

_AXES = (
    "micro_batch_size",
    "tp",
    "ep",
    "cp",
    "etp",
    "sequence_parallel",
    "context_parallel",
    "fused_loss",
)


def _one() -> Array:
    return np.ones(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCombos:
    """The distinct shard shapes of the candidates; `index` maps back.

    Attributes:
        sequence_parallel, fused_loss: 0 or 1; context_parallel: index into CONTEXTS.
        policies: the recompute policies that tables are made for.
    """

    micro_batch_size: Array
    tp: Array
    ep: Array
    cp: Array
    index: NDArray[np.int64]
    etp: Array = field(default_factory=_one)
    sequence_parallel: Array = field(default_factory=_one)
    context_parallel: Array = field(default_factory=lambda: np.zeros(1))
    fused_loss: Array = field(default_factory=lambda: np.zeros(1))
    policies: tuple[Policy, ...] = STANDARD

    def __len__(self) -> int:
        return len(self.tp)


def shard_combos(candidates: Candidates) -> ShardCombos:
    """Returns the distinct shard shapes and, for each candidate, which one it has."""
    columns = [getattr(candidates, name) for name in _AXES]
    first, index = distinct(*columns)
    shapes = {n: c[first].astype(float) for n, c in zip(_AXES, columns, strict=True)}
    return ShardCombos(**shapes, index=index, policies=policies_of(candidates))


def shard_shape(scenario: Scenario, combos: ShardCombos, calibration: Calibration) -> ShardShape:
    """Returns what blocks need to know of the plans and of the software that runs them."""
    workload = scenario.workload
    packing = workload.packing
    documents = () if packing is None else tuple((d.tokens, d.share) for d in packing.lengths)
    ulysses = combos.context_parallel == CONTEXTS.index("ulysses")
    return ShardShape(
        micro_batch_size=combos.micro_batch_size,
        seq_len=workload.seq_len,
        tp=combos.tp,
        ep=combos.ep,
        cp=combos.cp,
        etp=combos.etp,
        dtype=workload.precision.compute,
        sequence_parallel=combos.sequence_parallel > 0,
        ulysses=ulysses,
        attention_kernel=calibration.attention_kernel,
        pad_vocab_to=calibration.pad_vocab_to,
        expert_load=busiest_over_mean(scenario.model.moe, workload.expert_load, combos.ep),
        fused_loss=combos.fused_loss > 0,
        documents=documents,
    )
