"""A plan's bytes on a software stack: what tensors, the allocator and the device hold.

stages.py prices our own executor exactly. Here the same counts (numbers a rank holds,
micro-batches in flight) meet a stack's habits (profile.py), and each stage's peak is the
fullest of its moments: the loss, the head's backward, a layer's backward, the table's
gradient, the update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from flopwright.ops import Array
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import chunks_of_stage
from flopwright.simulator.memory.profile import MemoryProfile
from flopwright.simulator.memory.stack_layers import StackLayer, chunk_layers, stack_layers
from flopwright.simulator.memory.stack_moments import StagePeaks, stage_peaks
from flopwright.simulator.memory.stack_states import RankNumbers, StackStates, states
from flopwright.simulator.training.layers import EMBEDDING, HEAD
from flopwright.spec.cluster import GpuSpec
from flopwright.spec.scenario import Scenario

# Matrix-product workspaces of torch and Transformer Engine: from Hopper on, and before.
_LARGE_WORKSPACE: Final = 32 * 2**20
_SMALL_WORKSPACE: Final = 8 * 2**20
# Longer runs switch the loader's mask off: it grows with the square.
_LONGEST_MASK: Final = 16_384
_BEFORE_HOPPER: Final = ("a100", "a800", "v100", "a6000", "rtx", "l40", "t4")


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMemory:
    """Bytes of a rank of every stage, (pp,) arrays.

    Attributes:
        classes: at the peak, by memory class; they sum to `allocated`.
        resident: between steps.
        first_step: peak of the first step: the optimizer's moments come with its update.
        allocated: peak of the tensors; `held`: of the blocks that the caching allocator needs
            for them, fragments apart.
        host: host memory behind a rank.
    """

    classes: dict[str, Array]
    resident: Array
    first_step: Array
    allocated: Array
    held: Array
    host: Array


def stack_memory(scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile) -> StackMemory:
    """Returns what every stage of `plan` holds when `profile`'s stack runs it."""
    layers = stack_layers(scenario, plan, profile)
    numbers = [_numbers(scenario, plan, layers, s) for s in range(plan.pp)]
    found = [states(scenario, plan, profile, n) for n in numbers]
    fixed = _fixed_bytes(scenario, plan, profile)
    peaks = [stage_peaks(scenario, plan, profile, layers, s, found[s]) for s in range(plan.pp)]

    def column(values: list[float]) -> Array:
        return np.array(values)

    classes = {
        "weights": column([f.weights for f in found]),
        "gradients": column([p.peak.gradients for p in peaks]),
        "optimizer_state": column([f.optimizer for f in found]),
        "activations": column([p.peak.activations for p in peaks]),
        "temporaries": column(
            [p.peak.temporaries + f.standing + fixed for p, f in zip(peaks, found, strict=True)]
        ),
    }
    allocated = np.asarray(sum(classes.values()))
    resident = column([f.resident + fixed for f in found])
    moments = column([f.moments for f in found])
    return StackMemory(
        classes=classes,
        resident=resident,
        first_step=np.maximum(allocated - moments, resident + column([f.update for f in found])),
        allocated=allocated,
        held=_held(profile, peaks, found, fixed, allocated),
        host=column([f.host + p.host for p, f in zip(peaks, found, strict=True)]),
    )


def _held(
    profile: MemoryProfile,
    peaks: list[StagePeaks],
    found: list[StackStates],
    fixed: float,
    allocated: Array,
) -> Array:
    """Returns the blocks that the allocator must hold.

    A tensor of gigabytes that the update makes finds no cached block of its size, and blocks
    are only given back where memory runs out: such tensors stand beside the rest.
    """
    if not profile.flat_update:
        return allocated
    beside = [
        p.before_update + f.update + f.resident - f.gradients + fixed
        for p, f in zip(peaks, found, strict=True)
    ]
    return np.asarray(np.maximum(allocated, np.array(beside)))


def _numbers(
    scenario: Scenario, plan: ParallelPlan, layers: dict[str, StackLayer], stage: int
) -> RankNumbers:
    kinds = chunk_layers(scenario, plan)
    mine: dict[str, int] = {}
    for chunk in chunks_of_stage(plan, stage):
        for kind, count in kinds[chunk].items():
            mine[kind] = mine.get(kind, 0) + count
    copy = layers[EMBEDDING].dense if _copies_table(scenario, set(mine)) else 0.0

    def total(name: str, kinds: set[str]) -> float:
        return float(sum(n * getattr(layers[k], name) for k, n in mine.items() if k in kinds))

    every, ends = set(mine), {EMBEDDING, HEAD}
    return RankNumbers(
        held=total("held", every) + copy,
        dense=total("dense", every) + copy,
        matrix=total("matrix", every),
        expert=total("expert", every),
        in_layers=total("matrix", every) + total("expert", every),
        largest_group=max((layers[k].held for k in every - ends), default=0.0),
        root=total("held", ends) + copy,
        adapters=total("adapters", every),
        expert_adapters=total("expert_adapters", every),
    )


def _copies_table(scenario: Scenario, kinds: set[str]) -> bool:
    """Returns whether a stage holds the head that shares a table standing elsewhere."""
    return scenario.model.tied_embeddings and HEAD in kinds and EMBEDDING not in kinds


def _fixed_bytes(scenario: Scenario, plan: ParallelPlan, profile: MemoryProfile) -> float:
    """Returns what stands for good: workspaces, the attention mask."""
    seq, mbs = scenario.workload.seq_len, plan.micro_batch_size
    mask = float(mbs * seq * seq) if profile.attention_mask and seq <= _LONGEST_MASK else 0.0
    return profile.workspaces * workspace_bytes(scenario.cluster.node.gpu) + mask


def workspace_bytes(gpu: GpuSpec) -> float:
    """Returns the bytes of one matrix-product workspace on a GPU."""
    if gpu.kind == "cpu":
        return 0.0
    old = gpu.name.lower().startswith(_BEFORE_HOPPER)
    return float(_SMALL_WORKSPACE if old else _LARGE_WORKSPACE)
