"""Seconds of one forward pass of an engine: operators, attention over the cache, links, host.

Operators go through the roofline that training's do (`simulator.operators`), exchanges and
all-reduces through the same link model (`simulator.collectives`); the curves are those of
serving kernels (`curves.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.ops import Array, Collective, OpKind, OpTable
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import GroupShape, group_shape
from flopwright.simulator.operators.times import op_seconds
from flopwright.simulator.rollouts.engine.attention import decode_seconds, prefill_seconds
from flopwright.simulator.rollouts.engine.curves import (
    ServingCurves,
    kernel_calibration,
    serving_curves,
)
from flopwright.simulator.rollouts.engine.exchange import exchange_seconds
from flopwright.simulator.rollouts.engine.imbalance import busiest_share
from flopwright.simulator.rollouts.engine.rows import Load, end_rows, layer_rows
from flopwright.spec.cluster import ClusterSpec
from flopwright.spec.rollouts.engine_served import (
    EngineShape,
    EngineSoftware,
    ServedLayers,
    ServedModel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A model on its GPUs under an engine, ready to be priced.

    Attributes:
        calibration: a calibration of the user's own; its curves replace the shipped ones.
    """

    model: ServedModel
    cluster: ClusterSpec
    shape: EngineShape
    software: EngineSoftware
    calibration: Calibration | None = None

    @property
    def curves(self) -> ServingCurves:
        """Serving curves of the GPU."""
        return serving_curves(self.cluster.node.gpu)

    def kernels(self) -> Calibration:
        """Returns the curves that price operators."""
        return kernel_calibration(self.cluster.node.gpu, self.calibration)

    def group(self, size: int, stride: int = 1) -> GroupShape:
        """Returns the layout of a group of the instance's GPUs."""
        return group_shape(size, stride, self.cluster.node.domain_gpus)

    def skew(self, layers: ServedLayers) -> float:
        """Returns the load of the GPU with the busiest experts over the mean."""
        if layers.moe is None:
            return 1.0
        cv = 0.0 if self.software.balanced_experts else self.software.expert_load_cv
        slots = (layers.moe.num_experts + self.shape.redundant_experts) / self.shape.ep
        return busiest_share(cv, slots, self.shape.ep)


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of a pass by what they are spent on; arrays over the loads' columns."""

    parts: dict[str, Array]

    @property
    def seconds(self) -> Array:
        """Seconds of the pass."""
        return np.asarray(np.sum(list(self.parts.values()), axis=0))


_PARTS = (
    "products", "experts", "memory_bound", "decode_attention", "prefill_attention",
    "tp_comm", "ep_comm", "host",
)  # fmt: skip


def pass_seconds(on: Served, loads: Load) -> PassTime:
    """Returns the seconds of one forward pass of the instance, by column of the loads.

    Parts: "products", "experts", "memory_bound", "decode_attention", "prefill_attention",
    "tp_comm", "ep_comm" (what of it is exposed), "host".
    """
    if on.software.two_batches and on.shape.dp > 1:
        half = _one_batch(on, loads.scaled(0.5))
        parts = {name: 2 * seconds for name, seconds in half.items()}
        compute = sum((v for k, v in parts.items() if k != "ep_comm"), np.zeros(loads.size))
        hidden = on.software.hidden_share * np.minimum(compute, parts["ep_comm"])
        parts["ep_comm"] = parts["ep_comm"] - hidden
    else:
        parts = _one_batch(on, loads)
    host = on.software.step_host_s + on.software.attempt_host_s * (loads.attempts + loads.prompts)
    parts["host"] = np.asarray(np.where(loads.rows > 0, host, 0.0))
    return PassTime(parts)


def _one_batch(on: Served, loads: Load) -> dict[str, Array]:
    gpu, kernels = on.cluster.node.gpu, on.kernels()
    parts = {name: np.zeros(loads.size) for name in _PARTS}
    for group in on.model.layers:
        cost = layer_rows(on.model, group, on.shape, gpu, loads, on.skew(group))
        _add(parts, cost.ops, op_seconds(cost.ops, gpu, kernels).seconds, group.count)
        parts["decode_attention"] += group.count * decode_seconds(on, group, loads)
        parts["prefill_attention"] += group.count * prefill_seconds(on, group, loads)
        parts["tp_comm"] += group.count * _all_reduce_s(on, group, loads)
        parts["ep_comm"] += group.count * exchange_seconds(on, group, loads)
    ends = end_rows(on.model, on.shape, gpu, loads, on.software.logit_bytes)
    _add(parts, ends.ops, op_seconds(ends.ops, gpu, kernels).seconds, 1)
    return parts


_PART = {
    OpKind.GROUPED_GEMM: "experts",
    OpKind.MEMORY_BOUND: "memory_bound",
    OpKind.ATTENTION: "prefill_attention",
}


def _add(parts: dict[str, Array], ops: OpTable, seconds: Array, times: int) -> None:
    for row in range(len(ops)):
        part = _PART.get(OpKind(ops.kind[row]), "products")
        parts[part] = parts[part] + times * seconds[row]


def _all_reduce_s(on: Served, group: ServedLayers, loads: Load) -> Array:
    """Seconds of the all-reduces of one layer: behind attention, and behind what follows it."""
    tp = on.shape.tp
    if tp == 1:
        return np.zeros(loads.size)
    alone = group.moe is not None and on.shape.dp > 1  # experts are exchanged instead
    nbytes = loads.rows * on.model.hidden_size * 2
    return all_reduce_seconds(on, nbytes, tp) * (1 if alone else 2)


def all_reduce_seconds(on: Served, nbytes: Array, ranks: int) -> Array:
    """Returns the seconds of one all-reduce: the engine's own kernel inside a node, or NCCL.

    The engine takes the faster of the two at a size.
    """
    group = on.group(ranks)
    bare = Calibration(id="formulas", created="", source="link curves")
    nccl = collective_seconds(Collective.ALL_REDUCE, nbytes, group, on.cluster, bare).seconds
    own = [c for c in on.curves.all_reduce if c.ranks == ranks]
    if bool(group.spans) or not own:
        return np.asarray(nccl)
    return np.asarray(np.minimum(nccl, own[0].alpha_s + nbytes / own[0].bytes_per_s))
