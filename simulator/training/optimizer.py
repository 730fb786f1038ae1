"""Seconds of the update on a rank, and of its traffic where the state lives on the host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.models.optim.adamw import cost as adamw
from flopwright.models.optim.muon import cost as muon
from flopwright.ops import Array, OpKind, OpTable
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.parameters import ParamCounts, split_axis
from flopwright.simulator.memory.shards import zero_shards
from flopwright.simulator.memory.stages import optimizer_bytes
from flopwright.simulator.operators.times import op_seconds
from flopwright.simulator.training.candidates import Candidates
from flopwright.spec.cluster import DTYPE_BYTES, LinkSpec
from flopwright.spec.parameters import layer_parameters
from flopwright.spec.scenario import Scenario

_MANY: Final = 1e9  # numbers whose update tells the rate


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateTimes:
    """Seconds by (stages, candidates)."""

    update_s: Array
    offload_s: Array
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRates:
    """The element-wise update: seconds of an empty one, and of one more number.

    Its kernels only move bytes, so that three prices tell them, however many plans there are.
    """

    start_s: float
    other_s: float
    matrix_s: float
    assumptions: tuple[str, ...]

    def seconds(self, numel: Array, matrix_numel: Array) -> Array:
        """Returns the seconds of `numel` numbers, `matrix_numel` of them in matrices."""
        more = self.matrix_s - self.other_s
        return np.asarray(self.start_s + self.other_s * numel + more * matrix_numel)


def update_seconds(
    scenario: Scenario,
    candidates: Candidates,
    params: ParamCounts,
    muon_s: tuple[Array, Array],
    rates: UpdateRates,
) -> UpdateTimes:
    """Returns the update of each stage's share of the numbers.

    Args:
        params: numbers held by stage, (stages, C).
        muon_s: seconds of orthogonalising a stage's (dense, expert) matrices, (stages, C).
        rates: of the element-wise update (update_rates).

    With the optimizer offloaded the gradients go to the host and the weights come back, and
    the host streams its state twice at the speed of its link; Muon's matrix products stay.

    Raises:
        InputError: an offloaded optimizer on a cluster without a host link.
    """
    dense_shards, expert_shards = zero_shards(candidates)
    sharded = candidates.zero_stage > 0
    dense = params.dense / np.where(sharded, dense_shards, 1)
    matrix = params.dense_matrix / np.where(sharded, dense_shards, 1)
    expert = params.expert / np.where(sharded, expert_shards, 1)
    on_gpu, notes = rates.seconds(dense + expert, matrix + expert), rates.assumptions
    products = muon_s[0] / np.where(sharded, dense_shards, 1)
    products = products + muon_s[1] / np.where(sharded, expert_shards, 1)
    offloaded = candidates.optimizer_offload > 0
    if not offloaded.any():
        return UpdateTimes(
            update_s=on_gpu + products,
            offload_s=np.zeros(dense.shape),
            assumptions=notes,
        )
    link = host_link(scenario)
    precision = scenario.workload.precision
    there_and_back = DTYPE_BYTES[precision.gradients] + DTYPE_BYTES[precision.weights]
    moved = (dense + expert) * there_and_back
    moved = moved + 2 * optimizer_bytes(scenario, dense, matrix, expert)
    return UpdateTimes(
        update_s=np.where(offloaded, 0.0, on_gpu) + products,
        offload_s=np.where(offloaded, moved / link.bytes_per_s + link.latency_s, 0.0),
        assumptions=(*notes, "the host updates at the speed of its link"),
    )


def update_rates(scenario: Scenario, calibration: Calibration) -> UpdateRates:
    """Returns what the element-wise update of the scenario's optimizer takes."""
    ops = update_ops(scenario, np.array([0.0, _MANY, _MANY]), np.array([0.0, 0.0, _MANY]))
    assert not ops.flops.any()
    times = op_seconds(ops, scenario.cluster.node.gpu, calibration)
    start, others, matrices = (float(s) for s in times.seconds.sum(axis=0))
    return UpdateRates(
        start_s=start,
        other_s=(others - start) / _MANY,
        matrix_s=(matrices - start) / _MANY,
        assumptions=times.assumptions,
    )


def host_link(scenario: Scenario) -> LinkSpec:
    """Returns the link between a processor and its host.

    Raises:
        InputError: the cluster does not name one.
    """
    link = scenario.cluster.node.host_link
    if link is None:
        raise InputError(
            Violation(
                field="cluster.node.host_link",
                rule="an offloaded optimizer or activation needs the link to the host",
                nearest_fix="give the cluster's host_link, or leave the offload out",
            )
        )
    return link


def update_ops(scenario: Scenario, numel: Array, matrix_numel: Array) -> OpTable:
    """Returns the element-wise STEP rows of `numel` weights, `matrix_numel` of them in matrices.

    The orthogonalisation of whole matrices is priced by `muon_seconds`.
    """
    elements = [muon.Matrices(rows=1, columns=1, count=matrix_numel)]
    precision = scenario.workload.precision
    is_muon = scenario.workload.optimizer.kind == "muon"
    table = partial(
        partial(muon.step_cost, elements, numel - matrix_numel)
        if is_muon
        else partial(adamw.step_cost, numel),
        weights=precision.weights,
        gradients=precision.gradients,
        master=None if precision.master_weights == "none" else precision.master_weights,
        state=precision.optimizer_state,
    )(num_candidates=len(numel))
    return _elementwise(table.ops, True)


def muon_seconds(
    scenario: Scenario, layer: int, calibration: Calibration
) -> tuple[float, float, float]:
    """Returns seconds of orthogonalising a layer's matrices: (whole, tensor-parallel, experts).

    Each matrix is orthogonalised once among the ranks that share it, spread evenly.
    """
    out = {"whole": 0.0, "tp": 0.0, "ep": 0.0}
    # Adapters are thin: their products are too small to count beside the element-wise update.
    if scenario.workload.optimizer.kind != "muon" or scenario.workload.lora_rank is not None:
        return (0.0, 0.0, 0.0)
    compute = muon.compute_dtype(scenario.workload.precision)
    per_head = scenario.workload.optimizer.per_head
    for param in layer_parameters(scenario.model, layer):
        if not (param.is_matrix and param.trainable):
            continue
        heads = muon.head_parts(scenario.model, param) if per_head else 1
        matrices = muon.matrices_of(param, heads if heads > 1 else 0)
        cost = muon.step_cost([matrices], compute=compute)
        ops = _elementwise(cost.ops, False)
        times = op_seconds(ops, scenario.cluster.node.gpu, calibration)
        out[split_axis(param)] += float(times.seconds.sum())
    return (out["whole"], out["tp"], out["ep"])


def _elementwise(ops: OpTable, wanted: bool) -> OpTable:
    """Returns the element-wise rows of a table, or the others."""
    keep = [i for i in range(len(ops)) if (ops.kind[i] == OpKind.OPTIMIZER) == wanted]

    def names(column: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(column[i] for i in keep)

    return OpTable(
        name=names(ops.name),
        tag=names(ops.tag),
        kernel=names(ops.kernel),
        dtype=names(ops.dtype),
        kind=ops.kind[keep],
        phase=ops.phase[keep],
        m=ops.m[keep],
        k=ops.k[keep],
        n=ops.n[keep],
        batch=ops.batch[keep],
        count=ops.count[keep],
        flops=ops.flops[keep],
        read_bytes=ops.read_bytes[keep],
        written_bytes=ops.written_bytes[keep],
    )
