"""Data-parallel traffic and the end of a step: gradient reduction, update, gathering of weights.

ZeRO stage 0 all-reduces gradients; stages 1 and up reduce-scatter them and all-gather the
weights (arXiv 1910.02054) inside a shard group; replicas of that group all-reduce their
shards once a step. Stage 2 scatters after every micro-batch, stage 3 also gathers the weights
for every forward and backward. Weights of experts travel between the ranks that hold the
same experts, the others over all data- and context-parallel ranks. Cut by ZeRO, Muon gathers
the momenta of whole matrices (arXiv 2502.16982, Algorithm 1).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.models.moe.cost import SCORE_BINS
from flopwright.ops import Array, Collective
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import GroupShape, group_shape
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.training.alike import Alike
from flopwright.simulator.training.candidates import Candidates, Ints
from flopwright.simulator.training.optimizer import UpdateRates, update_seconds
from flopwright.simulator.training.overlap import exposed
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario

_NORM_BYTES = 8.0  # the squared gradient norm, one float64, summed over all ranks
_LOAD_BYTES = 8  # tokens of one expert in a step, int64
_MOMENTUM_BYTES = 2  # Muon gathers bf16 momenta of cut matrices (arXiv 2502.16982, Alg. 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataTraffic:
    """Seconds over data-parallel groups by stage, nothing hidden, (stages, candidates).

    Attributes:
        forward_s, backward_s: in every micro-batch (ZeRO-2 and 3).
        reduce_s: gradients once a step; gather_s: weights, behind the update.
        update_s: what the update itself exchanges: Muon's momenta, the experts' loads.
        norm_s: summing the gradient norm over all ranks, (candidates,).
    """

    forward_s: Array
    backward_s: Array
    reduce_s: Array
    gather_s: Array
    update_s: Array
    norm_s: Array
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """Seconds at the end of a step by stage, (stages, candidates).

    Attributes:
        reduce_s: exposed gradient reduction ("dp_comm").
        gather_s: gathering of weights, and what the update exchanges ("dp_comm").
        norm_s: summing the gradient norm over all ranks, (candidates,); all ranks meet there.
        host_s: the stack's constant a step ("host").
        of_ranks: update_s, offload_s and comm_bytes by kind of rank, (stages, K), which
            `ranks` spreads over candidates where they are asked for.
    """

    reduce_s: Array
    gather_s: Array
    norm_s: Array
    host_s: float
    ranks: Alike
    of_ranks: tuple[Array, Array, Array]
    assumptions: tuple[str, ...]

    @property
    def update_s(self) -> Array:
        """The optimizer itself."""
        return self.ranks.spread(self.of_ranks[0])

    @property
    def offload_s(self) -> Array:
        """The optimizer's traffic to the host."""
        return self.ranks.spread(self.of_ranks[1])

    @property
    def comm_bytes(self) -> Array:
        """What a rank sends of its stage over data-parallel groups in a step."""
        return self.ranks.spread(self.of_ranks[2])

    @property
    def tail_s(self) -> Array:
        """Everything behind the norm, by stage."""
        once = self.of_ranks[0] + self.of_ranks[1] + self.host_s
        return np.asarray(self.gather_s + self.ranks.spread(once))


def data_traffic(
    scenario: Scenario, candidates: Candidates, calibration: Calibration, params: ParamCounts
) -> DataTraffic:
    """Returns what travels over data-parallel groups.

    Args:
        params: numbers a rank of each stage holds, (stages, candidates).
    """
    price = _Price(scenario, calibration, {})
    traffic = _traffic(price, candidates, params, _groups(scenario, candidates))
    zero = candidates.zero_stage
    world = group_shape(candidates.world_size, 1, scenario.cluster.node.domain_gpus)
    norm_s = price.seconds(Collective.ALL_REDUCE, np.full(len(candidates), _NORM_BYTES), world)
    once = np.where(zero >= 2, 0.0, np.where(zero == 0, traffic.all_reduce_s, traffic.scatter_s))
    gathers = np.where(zero == 3, traffic.gather_s, 0.0)
    return DataTraffic(
        forward_s=gathers,
        backward_s=gathers + np.where(zero >= 2, traffic.scatter_s, 0.0),
        reduce_s=once + np.where(zero > 0, traffic.replicas_s, 0.0),
        gather_s=np.where((zero == 1) | (zero == 2), traffic.gather_s, 0.0),
        update_s=traffic.update_s,
        norm_s=norm_s,
        assumptions=tuple(price.notes),
    )


def step_end(
    scenario: Scenario,
    ranks: Alike,
    calibration: Calibration,
    params: ParamCounts,
    traffic: DataTraffic,
    compute_s: tuple[Array, Array],
    muon_s: tuple[Array, Array],
    rates: UpdateRates,
) -> StepEnd:
    """Returns the end of a step.

    Args:
        ranks: kinds of ranks (K of them); params, traffic, muon_s are theirs.
        compute_s: forward and backward of one micro-batch by stage, (stages, candidates),
            behind which weights are gathered ("dp_gather" of Calibration.hidden_share) and
            gradients are reduced ("dp_comm").
        muon_s, rates: see update_seconds.
    """
    few, spread = ranks.candidates, ranks.spread
    factor = calibration.factors.get("dp_comm", 1.0)
    reduced, _ = exposed({"dp_comm": spread(traffic.reduce_s)}, compute_s[1], calibration)
    gathered, _ = exposed({"dp_gather": spread(traffic.gather_s)}, compute_s[0], calibration)
    update = update_seconds(scenario, few, params, muon_s, rates)
    size = few.dp * few.cp
    latency = np.where(size > 1, calibration.data_parallel_latency_s * size, 0.0)
    return StepEnd(
        reduce_s=reduced["dp_comm"] + spread(latency),
        gather_s=gathered["dp_comm"] + spread(traffic.update_s * factor),
        norm_s=spread(traffic.norm_s * factor),
        host_s=calibration.step_constant_s,
        ranks=ranks,
        of_ranks=(
            update.update_s * calibration.factors.get("optimizer", 1.0),
            update.offload_s * calibration.factors.get("offload", 1.0),
            _comm_bytes(scenario, few, params),
        ),
        assumptions=(*traffic.assumptions, *update.assumptions),
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

    `replicas_s` sums the shards of replicated shard groups; `update_s` is what the update
    itself exchanges: Muon's momenta, the experts' loads.
    """

    all_reduce_s: Array
    scatter_s: Array
    gather_s: Array
    replicas_s: Array
    update_s: Array


@dataclass(frozen=True, slots=True)
class _Groups:
    """Groups that reduce numbers, that shard them, and the replicas of shards.

    `whole` and `shard` hold those of dense and of expert numbers side by side, (2, 1, C), so
    that one call prices both; `dense` is the former of `whole`.
    """

    whole: GroupShape
    dense: GroupShape
    shard: GroupShape
    replicas: GroupShape


def _traffic(
    price: _Price,
    candidates: Candidates,
    params: ParamCounts,
    groups: _Groups,
) -> _Traffic:
    workload = price.scenario.workload
    gradient, weight = (
        DTYPE_BYTES[d] for d in (workload.precision.gradients, workload.precision.weights)
    )

    def both(kind: Collective, nbytes: Array, where: GroupShape) -> Array:
        return np.asarray(price.seconds(kind, nbytes, where).sum(axis=-3))

    frozen = np.where(candidates.zero_stage == 3, _frozen_bytes(price.scenario, params), 0.0)
    gather = np.stack([params.dense * weight + frozen, params.expert * weight])
    update = _balance_s(price, candidates, params, groups.dense)
    if workload.optimizer.kind == "muon":
        momenta = np.stack([params.dense_matrix, params.expert]) * _MOMENTUM_BYTES
        gather_s, gathered = both(Collective.ALL_GATHER, np.stack([gather, momenta]), groups.shard)
        update = update + np.where(candidates.zero_stage > 0, gathered, 0.0)
    else:
        gather_s = both(Collective.ALL_GATHER, gather, groups.shard)
    scatter = np.stack([params.dense, params.expert]) * gradient
    replicas = np.zeros(params.dense.shape)
    if (candidates.dp_replicate > 1).any():
        replicas = both(Collective.ALL_REDUCE, scatter / groups.shard.size, groups.replicas)
    return _Traffic(
        both(Collective.ALL_REDUCE, scatter, groups.whole),
        both(Collective.REDUCE_SCATTER, scatter, groups.shard),
        gather_s,
        replicas,
        update,
    )


def _frozen_bytes(scenario: Scenario, params: ParamCounts) -> Array:
    """Returns the bytes of weights that adapters leave as they are; they are gathered too."""
    precision = scenario.workload.precision
    if scenario.workload.lora_rank is None:
        return np.zeros(params.dense.shape)
    width = DTYPE_BYTES[precision.frozen_weights or precision.weights]
    return np.asarray((params.held - params.dense - params.expert) * width)


def _balance_s(
    price: _Price, candidates: Candidates, params: ParamCounts, group: GroupShape
) -> Array:
    """Returns the seconds of summing the experts' loads, from which the routers' biases move."""
    model = price.scenario.model
    if model.moe is None or model.moe.router != "sigmoid_noaux_tc":
        return np.zeros(params.dense.shape)
    layers = model.num_moe_layers / candidates.pp
    numbers = 1 + SCORE_BINS if model.moe.balance == "quantile" else 1  # with the scores' bins
    each = layers * model.moe.num_experts * numbers * _LOAD_BYTES
    nbytes = np.where(params.expert > 0, each, 0.0)
    return price.seconds(Collective.ALL_REDUCE, nbytes, group)


def _comm_bytes(scenario: Scenario, candidates: Candidates, params: ParamCounts) -> Array:
    precision, zero = scenario.workload.precision, candidates.zero_stage
    m = candidates.num_microbatches(scenario.workload.global_batch_size)
    gathers = np.where(zero == 3, 2 * m, np.where(zero > 0, 1, 0))
    gradients = DTYPE_BYTES[precision.gradients] * np.where(zero >= 2, m, 1)
    each = gradients + gathers * DTYPE_BYTES[precision.weights]
    return np.asarray((params.dense + params.expert) * each)


def _groups(scenario: Scenario, c: Candidates) -> _Groups:
    """Returns the groups of plan/mesh.py's layout."""
    gpus = scenario.cluster.node.domain_gpus
    cut = c.ep * c.etp
    lending = c.dp_shard * c.cp * c.tp
    shard = np.maximum(lending // cut, 1)
    dense = (c.dp * c.cp, c.tp)
    whole = _pair(dense, (shard * c.dp_replicate, cut), gpus)
    return _Groups(
        whole=whole,
        dense=GroupShape(size=whole.size[0], local=whole.local[0], stride=dense[1].astype(float)),
        shard=_pair((c.dp_shard * c.cp, c.tp), (shard, cut), gpus),
        replicas=group_shape(c.dp_replicate, lending, gpus),
    )


def _pair(dense: tuple[Ints, Ints], expert: tuple[Ints, Ints], gpus: int) -> GroupShape:
    """Returns the groups of (size, stride) of dense and of expert numbers, (2, 1, candidates)."""
    size, stride = (np.stack(x)[:, None] for x in zip(dense, expert, strict=True))
    return group_shape(size, stride, gpus)
