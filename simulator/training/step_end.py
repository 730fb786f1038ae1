"""The end of a step: gradient reduction, the update, the gathering of weights.

ZeRO stage 0 all-reduces gradients; stages 1 and up reduce-scatter them and all-gather the
weights (arXiv 1910.02054). Stage 2 reduces after every micro-batch, stage 3 also gathers
the weights for every forward and backward. Weights of experts travel between the ranks that
hold the same experts, the others over all data- and context-parallel ranks. Cut by ZeRO,
Muon gathers the momenta of whole matrices (arXiv 2502.16982, Algorithm 1).
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

_NORM_BYTES = 8.0  # the squared gradient norm, one float64, summed over all ranks
_LOAD_BYTES = 8  # tokens of one expert in a step, int64
_MOMENTUM_BYTES = 2  # Muon gathers bf16 momenta of cut matrices (arXiv 2502.16982, Alg. 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Seconds at the end of a step by stage, (stages, candidates).

    Attributes:
        reduce_s: exposed gradient reduction ("dp_comm").
        gather_s: gathering of weights, and what the update exchanges ("dp_comm").
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
    price = _Price(scenario, calibration, {})
    groups = _groups(scenario, candidates)
    traffic = _traffic(price, candidates, params, groups)
    zero = candidates.zero_stage
    share = calibration.hidden_share.get("dp_comm", 0.0)
    factor = calibration.factors.get("dp_comm", 1.0)
    reduction = np.where(zero == 0, traffic.all_reduce_s, traffic.scatter_s)
    per_micro = np.where(zero >= 2, traffic.scatter_s, 0.0)
    per_micro = per_micro + np.where(zero == 3, 2 * traffic.gather_s, 0.0)
    exposed = np.where(zero >= 2, 0.0, _exposed(reduction, share, microbatch_backward_s))
    gathers = np.where((zero == 1) | (zero == 2), traffic.gather_s, 0.0) + traffic.update_s
    update = update_seconds(scenario, candidates, calibration, params, muon_s)
    world = group_shape(candidates.world_size, 1, scenario.cluster.node.domain_gpus)
    norm_s = price.seconds(Collective.ALL_REDUCE, np.full(len(candidates), _NORM_BYTES), world)
    return StepEnd(
        reduce_s=exposed * factor,
        gather_s=gathers * factor,
        update_s=update.update_s * calibration.factors.get("optimizer", 1.0),
        offload_s=update.offload_s * calibration.factors.get("offload", 1.0),
        norm_s=norm_s * factor,
        micro_s=_exposed(per_micro, share, microbatch_backward_s) * factor,
        comm_bytes=_comm_bytes(scenario, candidates, params),
        assumptions=(*price.notes, *update.assumptions),
    )


@dataclass(frozen=True, slots=True)
class _Price:
    """Seconds of collectives; what they assume is collected in `notes`."""

    scenario: Scenario
    calibration: Calibration
    notes: dict[str, None]

    def seconds(self, kind: Collective, nbytes: Array, group: GroupShape) -> Array:
        """Returns the seconds of one call, 0 where nothing is sent."""
        cluster = self.scenario.cluster
        times = collective_seconds(kind, nbytes, group, cluster, self.calibration)
        self.notes.update(dict.fromkeys(times.assumptions))
        return np.asarray(np.where(nbytes > 0, times.seconds, 0.0))


@dataclass(frozen=True, slots=True)
class _Traffic:
    """Seconds of moving a stage's gradients and weights once, (stages, C).

    `update_s` is what the update itself exchanges: Muon's momenta, the experts' loads.
    """

    all_reduce_s: Array
    scatter_s: Array
    gather_s: Array
    update_s: Array


def _traffic(
    price: _Price,
    candidates: Candidates,
    params: ParamCounts,
    groups: tuple[GroupShape, GroupShape],
) -> _Traffic:
    workload = price.scenario.workload
    gradient, weight = (
        DTYPE_BYTES[d] for d in (workload.precision.gradients, workload.precision.weights)
    )

    def both(kind: Collective, dense: Array, expert: Array) -> Array:
        return price.seconds(kind, dense, groups[0]) + price.seconds(kind, expert, groups[1])

    update = _balance_s(price, candidates, params, groups[0])
    if workload.optimizer.kind == "muon":
        matrices = (params.dense_matrix * _MOMENTUM_BYTES, params.expert * _MOMENTUM_BYTES)
        cut = candidates.zero_stage > 0
        update = update + np.where(cut, both(Collective.ALL_GATHER, *matrices), 0.0)
    dense, expert = params.dense, params.expert
    return _Traffic(
        both(Collective.ALL_REDUCE, dense * gradient, expert * gradient),
        both(Collective.REDUCE_SCATTER, dense * gradient, expert * gradient),
        both(Collective.ALL_GATHER, dense * weight, expert * weight),
        update,
    )


def _balance_s(
    price: _Price, candidates: Candidates, params: ParamCounts, group: GroupShape
) -> Array:
    """Returns the seconds of summing the experts' loads, from which the routers' biases move."""
    model = price.scenario.model
    if model.moe is None or model.moe.router != "sigmoid_noaux_tc":
        return np.zeros(params.dense.shape)
    layers = model.num_moe_layers / candidates.pp
    nbytes = np.where(params.expert > 0, layers * model.moe.num_experts * _LOAD_BYTES, 0.0)
    return price.seconds(Collective.ALL_REDUCE, nbytes, group)


def _comm_bytes(scenario: Scenario, candidates: Candidates, params: ParamCounts) -> Array:
    precision, zero = scenario.workload.precision, candidates.zero_stage
    m = candidates.num_microbatches(scenario.workload.global_batch_size)
    gathers = np.where(zero == 3, 2 * m, np.where(zero > 0, 1, 0))
    gradients = DTYPE_BYTES[precision.gradients] * np.where(zero >= 2, m, 1)
    each = gradients + gathers * DTYPE_BYTES[precision.weights]
    return np.asarray((params.dense + params.expert) * each)


def _groups(scenario: Scenario, c: Candidates) -> tuple[GroupShape, GroupShape]:
    """Returns the groups that reduce dense and expert gradients (plan/mesh.py's layout)."""
    gpus = scenario.cluster.node.domain_gpus
    expert_size = np.maximum(c.dp * c.cp * c.tp // c.ep, 1)
    return group_shape(c.dp * c.cp, c.tp, gpus), group_shape(expert_size, c.ep, gpus)


def _exposed(seconds: Array, share: float, compute_s: Array) -> Array:
    return np.asarray(seconds - np.minimum(share * seconds, compute_s))
