"""The end of a step: gradient reduction, the update, the gathering of weights.

ZeRO stage 0 all-reduces gradients; stages 1 and up reduce-scatter them and all-gather the
weights (arXiv 1910.02054). Stage 2 reduces after every micro-batch, stage 3 also gathers
the weights for every forward and backward. Weights of experts travel between the ranks that
hold the same experts, the others over all data- and context-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.ops import Array, Collective
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import GroupShape, group_shape
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.optimizer import update_seconds
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario

_NORM_BYTES = 8  # the squared gradient norm, one float64, summed over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Seconds at the end of a step by stage, (stages, candidates).

    Attributes:
        reduce_s: exposed gradient reduction ("dp_comm").
        gather_s: gathering of weights after the update ("dp_comm").
        update_s: the optimizer itself ("optimizer"); offload_s: its traffic to the host.
        norm_s: summing the gradient norm over all ranks, (candidates,); all ranks meet there.
        micro_s: exposed reduction and gathering that ZeRO-2 and 3 do in every micro-batch.
        comm_bytes: what a rank sends of its stage over data-parallel groups in a step.
    """

    reduce_s: Array
    gather_s: Array
    update_s: Array
    offload_s: Array
    norm_s: Array
    micro_s: Array
    comm_bytes: Array
    assumptions: tuple[str, ...]


def step_end(
    scenario: Scenario,
    candidates: Candidates,
    calibration: Calibration,
    params: ParamCounts,
    microbatch_backward_s: Array,
    muon_s: tuple[Array, Array],
) -> StepEnd:
    """Returns the end of a step.

    Args:
        params: numbers a rank of each stage holds, (stages, candidates).
        microbatch_backward_s: backward of one micro-batch by stage, behind which
            the reduction may hide (Calibration.hidden_share).
        muon_s: see update_seconds.
    """
    precision = scenario.workload.precision
    groups = _groups(scenario, candidates)
    notes: dict[str, None] = {}
    one_gradient, one_gather = _traffic(scenario, calibration, params, groups, notes)
    scatter, gather_width = one_gradient[1], one_gather
    zero = candidates.zero_stage
    m = candidates.num_microbatches(scenario.workload.global_batch_size)
    factor = calibration.factors.get("dp_comm", 1.0)
    share = calibration.hidden_share.get("dp_comm", 0.0)
    reduction = np.where(zero == 0, one_gradient[0], scatter)
    per_micro = np.where(zero >= 2, scatter, 0.0) + np.where(zero == 3, 2 * gather_width, 0.0)
    update = update_seconds(scenario, candidates, calibration, params, muon_s)
    norm = collective_seconds(
        Collective.ALL_REDUCE,
        _NORM_BYTES,
        group_shape(candidates.world_size, 1, scenario.cluster.node.gpus),
        scenario.cluster,
        calibration,
    )
    width = DTYPE_BYTES[precision.gradients]
    total = params.dense + params.expert
    return StepEnd(
        reduce_s=np.where(zero >= 2, 0.0, _exposed(reduction, share, microbatch_backward_s))
        * factor,
        gather_s=np.where((zero == 1) | (zero == 2), gather_width, 0.0) * factor,
        update_s=update.update_s * calibration.factors.get("optimizer", 1.0),
        offload_s=update.offload_s * calibration.factors.get("offload", 1.0),
        norm_s=norm.seconds * factor,
        micro_s=_exposed(per_micro, share, microbatch_backward_s) * factor,
        comm_bytes=total * width * np.where(zero >= 2, m, 1)
        + np.where(zero > 0, total, 0) * DTYPE_BYTES[precision.weights],
        assumptions=(*notes, *update.assumptions, *norm.assumptions),
    )


def _groups(scenario: Scenario, c: Candidates) -> tuple[GroupShape, GroupShape]:
    """Returns the groups that reduce dense and expert gradients (plan/mesh.py's layout)."""
    gpus = scenario.cluster.node.gpus
    expert_size = np.maximum(c.dp * c.cp * c.tp // c.ep, 1)
    return group_shape(c.dp * c.cp, c.tp, gpus), group_shape(expert_size, c.ep, gpus)


def _traffic(
    scenario: Scenario,
    calibration: Calibration,
    params: ParamCounts,
    groups: tuple[GroupShape, GroupShape],
    notes: dict[str, None],
) -> tuple[tuple[Array, Array], Array]:
    """Returns (all-reduce, reduce-scatter) of all gradients and the gathering of all weights."""
    precision = scenario.workload.precision
    out = []
    for kind, width in (
        (Collective.ALL_REDUCE, DTYPE_BYTES[precision.gradients]),
        (Collective.REDUCE_SCATTER, DTYPE_BYTES[precision.gradients]),
        (Collective.ALL_GATHER, DTYPE_BYTES[precision.weights]),
    ):
        total = np.zeros(params.dense.shape)
        for numel, group in zip((params.dense, params.expert), groups, strict=True):
            times = collective_seconds(kind, numel * width, group, scenario.cluster, calibration)
            notes.update(dict.fromkeys(times.assumptions))
            total += np.where(numel > 0, times.seconds, 0.0)
        out.append(total)
    return (out[0], out[1]), out[2]


def _exposed(seconds: Array, share: float, compute_s: Array) -> Array:
    return np.asarray(seconds - np.minimum(share * seconds, compute_s))
