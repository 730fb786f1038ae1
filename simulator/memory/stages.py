"""Bytes of a rank by memory class and pipeline stage, for plans with the same pipeline.

Rajbhandari et al. (arXiv 1910.02054) for what ZeRO cuts; in_flight.py for how many
micro-batches are held. Everything is the fullest moment of a step; a stage's classes are
summed as if their peaks met, which they do in the first backward of the steady state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.simulator.memory.in_flight import enough, in_flight
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.memory.shards import zero_shards
from flopwright.simulator.training.alike import Alike
from flopwright.simulator.training.candidates import Candidates
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario

Ints = NDArray[np.int64]

# E4M3 in tiles of 1 x 128 numbers, each tile with one fp32 scale (arXiv 2412.19437, 3.3).
FP8_BYTES_PER_NUMBER: Final = 1 + 4 / 128
# Micro-batches whose activations stay on the GPU while the rest is on the host: one in use,
# one on its way.
OFFLOAD_BUFFERS: Final = 2
# DeepSpeed reduces gradients through one contiguous buffer of this many numbers at most
# (executor/parallel/data_parallel/deepspeed.py); without a library, buckets of 25 million.
DEEPSPEED_BUCKET: Final = 500_000_000
PLAIN_BUCKET: Final = 25_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes by class, each (pp, C), on the rank and (host) behind it."""

    classes: dict[str, Array]
    host_bytes: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePeaks:
    """The fullest stage, (C,): all classes together and which one it is; the most host memory
    of a stage's rank.
    """

    peak_bytes: Array
    stage: Ints
    host_bytes: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedByChunk:
    """What chunks keep for one micro-batch, (pp * vpp, C) bytes.

    Attributes:
        schedule: which micro-batches run in which order.
        places: chunks by (place on the stage, stage).
        other: everything but what FP8 storage applies to, which is `fp8`.
        backward: the fullest moment of a chunk's backward (models/temporaries/cost.py),
            what is made again included.
    """

    schedule: str
    places: Ints
    other: Array
    fp8: Array
    backward: Array


def stage_memory(
    scenario: Scenario,
    ranks: Alike,
    params: ParamCounts,
    kinds: Alike,
    saved: SavedByChunk,
    factors: Mapping[str, float],
) -> StageMemory:
    """Returns the bytes of every stage's fullest rank.

    Args:
        ranks: kinds of ranks (K of them); params: numbers held by stage, (pp, K).
        kinds: kinds of micro-batches, whose chunks keep `saved`.
        factors: multipliers of classes (Calibration.memory_factors).
    """
    parts = _Parts.of(scenario, ranks, params, kinds, saved, factors)
    found = {name: ranks.spread(nbytes) for name, nbytes in parts.states.items()}
    found["activations"] = kinds.spread(parts.activations)
    # Gradients are reduced when all activations have gone: in their place, not beside them.
    beyond = ranks.spread(parts.reduction) - found["activations"]
    found["temporaries"] = np.maximum(kinds.spread(parts.backward), beyond)
    found["reserved"] = np.full(found["activations"].shape, parts.reserved)
    host_bytes = ranks.spread(parts.host) + kinds.spread(parts.parked)
    return StageMemory(classes=found, host_bytes=host_bytes)


def stage_peaks(
    scenario: Scenario,
    ranks: Alike,
    params: ParamCounts,
    kinds: Alike,
    saved: SavedByChunk,
    factors: Mapping[str, float],
) -> StagePeaks:
    """Returns what `stage_memory` of the same arguments sums up to."""
    parts = _Parts.of(scenario, ranks, params, kinds, saved, factors)
    states = np.asarray(sum(parts.states.values())) + parts.reserved
    backward = kinds.spread(parts.backward) + kinds.spread(parts.activations)
    total = np.maximum(backward, ranks.spread(parts.reduction))
    total += ranks.spread(states)
    stage = total.argmax(axis=0)
    host = ranks.spread(parts.host)
    if parts.parked.any():
        host = host + kinds.spread(parts.parked)
    return StagePeaks(
        peak_bytes=total[stage, np.arange(total.shape[1])],
        stage=stage,
        host_bytes=host.max(axis=0),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Whole bytes by stage: of kinds of ranks, (pp, K), and of kinds of micro-batches.

    Attributes:
        states, reduction, host: of ranks; activations, backward, parked: of micro-batches.
    """

    states: dict[str, Array]
    reduction: Array
    host: Array
    activations: Array
    backward: Array
    parked: Array
    reserved: float

    @classmethod
    def of(
        cls,
        scenario: Scenario,
        ranks: Alike,
        params: ParamCounts,
        kinds: Alike,
        saved: SavedByChunk,
        factors: Mapping[str, float],
    ) -> _Parts:
        def whole(name: str, nbytes: Array) -> Array:
            factor = factors.get(name, 1.0)
            return np.asarray(np.rint(nbytes if factor == 1.0 else nbytes * factor))

        classes, host = state_bytes(scenario, ranks.candidates, params)
        activations, parked = _activations(scenario, kinds.candidates, saved)
        reduction = _reduction_bytes(scenario, ranks.candidates, params)
        reserved = np.array(float(scenario.cluster.node.gpu.reserved_bytes))
        return cls(
            states={name: whole(name, nbytes) for name, nbytes in classes.items()},
            reduction=whole("temporaries", reduction),
            host=host,
            activations=whole("activations", activations),
            backward=whole("temporaries", saved.backward[saved.places].max(axis=0)),
            parked=parked,
            reserved=float(whole("reserved", reserved)),
        )


def state_bytes(
    scenario: Scenario, axes: Candidates, params: ParamCounts
) -> tuple[dict[str, Array], Array]:
    """Returns weights, gradients and optimizer_state by (pp, C), and what of it is on the host.

    Weights are cut from ZeRO stage 3 on, gradients from 2, optimizer state from 1. Buffers
    are never cut, weights beside adapters as others are. A plan may keep its shards of any
    of them in host memory.
    """
    precision = scenario.workload.precision
    shards = zero_shards(axes)

    def cut(stage: int) -> tuple[Array, Array, Array]:
        dense, expert = (np.where(axes.zero_stage >= stage, s, 1.0) for s in shards)
        return (
            np.ceil(params.dense / dense),
            np.ceil(params.dense_matrix / dense),
            np.ceil(params.expert / expert),
        )

    dense3, _, expert3 = cut(3)
    dense2, _, expert2 = cut(2)
    dense1, matrix1, expert1 = cut(1)
    state = optimizer_bytes(scenario, dense1, matrix1, expert1)
    weights = (dense3 + expert3) * DTYPE_BYTES[precision.weights]
    gradients = (dense2 + expert2) * DTYPE_BYTES[precision.gradients]
    away = {
        "weights": (axes.parameter_offload > 0, weights),
        "gradients": (axes.gradient_offload > 0, gradients),
        "optimizer_state": (axes.optimizer_offload > 0, state),
    }
    here = {name: np.where(on, 0.0, nbytes) for name, (on, nbytes) in away.items()}
    here["weights"] = here["weights"] + _untrained_bytes(scenario, axes, params, shards[0])
    return here, np.asarray(sum(np.where(on, nbytes, 0.0) for on, nbytes in away.values()))


def _untrained_bytes(
    scenario: Scenario, axes: Candidates, params: ParamCounts, shards: Array
) -> Array:
    """Returns the bytes of buffers, or of all weights where adapters alone are trained.

    Tables keep the weights' format where frozen matrices have one of their own.
    """
    workload, model = scenario.workload, scenario.model
    width = DTYPE_BYTES[workload.precision.weights]
    numbers = params.held - params.dense - params.expert
    if workload.lora_rank is None:
        return np.asarray(numbers * width)
    tables = np.zeros(numbers.shape)
    for stage in (0, -1):
        tables[stage] += model.vocab_size * model.hidden_size / axes.tp
    tables = np.minimum(tables, numbers)
    stored = DTYPE_BYTES[workload.precision.frozen_weights or workload.precision.weights]
    whole = (numbers - tables) * stored + tables * width
    return np.asarray(np.ceil(whole / np.where(axes.zero_stage >= 3, shards, 1.0)))


def optimizer_bytes(scenario: Scenario, dense: Array, dense_matrix: Array, expert: Array) -> Array:
    """Returns the bytes of master weights and optimizer state of so many numbers.

    Muon keeps one number a weight of a hidden matrix, AdamW two of every weight; expert
    weights are matrices.
    """
    precision, optimizer = scenario.workload.precision, scenario.workload.optimizer
    master = precision.master_weights
    master_width = 0 if master == "none" else DTYPE_BYTES[master]
    numbers = optimizer.states_per_matrix_weight * (dense_matrix + expert)
    numbers = numbers + 2 * (dense - dense_matrix)
    width = DTYPE_BYTES[precision.optimizer_state]
    return np.asarray((dense + expert) * master_width + numbers * width)


def _activations(scenario: Scenario, axes: Candidates, saved: SavedByChunk) -> tuple[Array, Array]:
    """Returns (on the rank, on the host), each (pp, C)."""
    width = DTYPE_BYTES[scenario.workload.precision.compute]
    fp8_on = axes.fp8_activations > 0
    offload = axes.activation_offload > 0
    fp8 = np.where(fp8_on, saved.fp8 * FP8_BYTES_PER_NUMBER / width, saved.fp8)
    # Offloading moves all but what is stored in FP8 (plan/parallel.py).
    moves = np.where(offload, saved.other + np.where(fp8_on, 0.0, fp8), 0.0)
    stays = saved.other + fp8 - moves
    vpp, pp = saved.places.shape
    held, parked = np.zeros((pp, stays.shape[1])), np.zeros((pp, stays.shape[1]))
    microbatches = axes.num_microbatches(scenario.workload.global_batch_size)
    listed = enough(saved.schedule, pp, microbatches)
    for m in np.unique(listed):
        here = np.flatnonzero(listed == m)
        for stage, mixtures in enumerate(in_flight(saved.schedule, pp, vpp, int(m))):
            mine = saved.places[:, stage, None]  # the stage's chunks, in local order
            local, moved = stays[mine, here], moves[mine, here]
            away = (mixtures @ moved).max(axis=0)
            buffer = np.minimum(OFFLOAD_BUFFERS * moved.max(axis=0), away)
            held[stage, here] = (mixtures @ local).max(axis=0) + buffer
            parked[stage, here] = away - buffer
    return held, parked


def _reduction_bytes(scenario: Scenario, axes: Candidates, params: ParamCounts) -> Array:
    """Returns the bytes that the gradients' reduction takes beside them, (pp, C)."""
    numel = params.dense + params.expert
    width = DTYPE_BYTES[scenario.workload.precision.gradients]
    bucket = np.where(axes.zero_stage > 0, DEEPSPEED_BUCKET, PLAIN_BUCKET)
    reduces = axes.dp_replicate * axes.dp_shard * axes.cp > 1
    return np.where(reduces, np.minimum(numel, bucket) * width, 0.0)
