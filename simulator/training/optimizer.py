"""Seconds of the update on a rank, and of its traffic where the state lives on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.ops import Array, CostBuilder, OpKind, OpTable, Phase
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.memory.shards import zero_shards
from flopwright.simulator.memory.stages import optimizer_bytes
from flopwright.simulator.operators.times import op_seconds
from flopwright.simulator.training.candidates import Candidates
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """Seconds by (stages, candidates)."""

    update_s: Array
    offload_s: Array
    assumptions: tuple[str, ...]


def update_seconds(
    scenario: Scenario, candidates: Candidates, calibration: Calibration, params: ParamCounts
) -> UpdateTimes:
    """Returns the update of each stage's share of the numbers.

    With the optimizer offloaded the gradients go to the host and the weights come back, and
    the host streams its state twice at the speed of its link.

    Raises:
        InputError: an offloaded optimizer on a cluster without a host link.
    """
    dense_shards, expert_shards = zero_shards(candidates)
    sharded = candidates.zero_stage > 0
    dense = params.dense / np.where(sharded, dense_shards, 1)
    matrix = params.dense_matrix / np.where(sharded, dense_shards, 1)
    expert = params.expert / np.where(sharded, expert_shards, 1)
    numel = (dense + expert).reshape(-1)
    ops = update_ops(scenario, numel, (matrix + expert).reshape(-1))
    times = op_seconds(ops, scenario.cluster.node.gpu, calibration)
    on_gpu = times.seconds.sum(axis=0).reshape(dense.shape)
    offloaded = candidates.optimizer_offload > 0
    if not offloaded.any():
        return UpdateTimes(
            update_s=on_gpu, offload_s=np.zeros(dense.shape), assumptions=times.assumptions
        )
    link = scenario.cluster.node.host_link
    if link is None:
        raise InputError(
            Violation(
                field="cluster.node.host_link",
                rule="an offloaded optimizer or activation needs the link to the host",
                nearest_fix="give the cluster's host_link, or leave the offload out",
            )
        )
    precision = scenario.workload.precision
    moved = (dense + expert) * (
        DTYPE_BYTES[precision.gradients] + DTYPE_BYTES[precision.weights]
    ) + 2 * optimizer_bytes(scenario, dense, matrix, expert)
    return UpdateTimes(
        update_s=np.where(offloaded, 0.0, on_gpu),
        offload_s=np.where(offloaded, moved / link.bytes_per_s + link.latency_s, 0.0),
        assumptions=(*times.assumptions, "the host updates at the speed of its link"),
    )


def update_ops(scenario: Scenario, numel: Array, matrix_numel: Array) -> OpTable:
    """Returns the STEP rows of updating `numel` weights, `matrix_numel` of them in matrices."""
    precision = scenario.workload.precision
    cost = CostBuilder()
    state = optimizer_bytes(scenario, numel - matrix_numel, np.zeros(len(numel)), matrix_numel)
    cost.op(
        "update",
        OpKind.OPTIMIZER,
        Phase.STEP,
        dtype=precision.optimizer_state,
        m=numel,
        read_bytes=state + numel * DTYPE_BYTES[precision.gradients],
        written_bytes=state + numel * DTYPE_BYTES[precision.weights],
    )
    return cost.build(len(numel)).ops
