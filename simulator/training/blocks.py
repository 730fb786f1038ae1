"""What one layer of each kind costs in time and memory, for every distinct shard shape.

Thousands of plans share a few dozen combinations of micro-batch, tp, ep and cp: each kind of
layer is priced once a combination, and plans pick their columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.models.temporaries.cost import backward_moments, fullest
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import Array, BlockCost, Collective, CommTable, Phase, ShardShape
from flopwright.plan.parallel import SELECTIVE_TAGS
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import GroupShape, group_shape
from flopwright.simulator.memory.parameters import ParamCounts, param_counts
from flopwright.simulator.operators.times import op_seconds
from flopwright.simulator.training.candidates import RECOMPUTES, Candidates, distinct
from flopwright.simulator.training.layers import is_transformer_layer, representatives
from flopwright.simulator.training.optimizer import muon_seconds
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario

# Time class of the collectives of a layer; context parallelism counts with tensor parallelism.
COMM_CLASSES = {"tp": "tp_comm", "cp": "tp_comm", "ep": "ep_comm"}
_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardCombos:
    """The distinct (micro_batch_size, tp, ep, cp) of the candidates; `index` maps back."""

    micro_batch_size: Array
    tp: Array
    ep: Array
    cp: Array
    index: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.tp)


def shard_combos(candidates: Candidates) -> ShardCombos:
    """Returns the distinct shard shapes and, for each candidate, which one it has."""
    c = candidates
    first, index = distinct(c.micro_batch_size, c.tp, c.ep, c.cp)
    mbs, tp, ep, cp = (a[first].astype(float) for a in (c.micro_batch_size, c.tp, c.ep, c.cp))
    return ShardCombos(micro_batch_size=mbs, tp=tp, ep=ep, cp=cp, index=index)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """One layer kind, one micro-batch, one rank. U combinations, R recompute policies.

    Attributes:
        forward: exposed seconds by time class, each (U,).
        backward: exposed seconds by time class, recompute included, each (R, U).
        comm_bytes: payload by group, each (R, U).
        flops: executed (R, U).
        saved_bytes, saved_fp8_bytes: kept from forward to backward, (R, U); the second part
            is what FP8 activation storage applies to.
        recomputed_bytes: what is made again while the layer runs backward, (R, U).
        temporary_bytes: the fullest moment of its backward beyond what it kept, (U,).
        muon_dense_s, muon_expert_s: seconds of orthogonalising the layer's matrices on one
            rank that held them alone, (U,).
    """

    forward: dict[str, Array]
    backward: dict[str, Array]
    comm_bytes: dict[str, Array]
    flops: Array
    saved_bytes: Array
    saved_fp8_bytes: Array
    recomputed_bytes: Array
    temporary_bytes: Array
    params: ParamCounts
    muon_dense_s: Array
    muon_expert_s: Array


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tables by layer kind, in the order of `representatives`, and what was assumed."""

    tables: dict[str, BlockTable]
    assumptions: tuple[str, ...]


def price_blocks(scenario: Scenario, combos: ShardCombos, calibration: Calibration) -> Blocks:
    """Returns the cost of one layer of every kind for every combination.

    Raises:
        InputError: an operator of a class or dtype that nothing prices.
    """
    precision, model = scenario.workload.precision, scenario.model
    shape = ShardShape(
        micro_batch_size=combos.micro_batch_size,
        seq_len=scenario.workload.seq_len,
        tp=combos.tp,
        ep=combos.ep,
        cp=combos.cp,
        dtype=precision.compute,
    )
    tables, notes = {}, dict[str, None]()
    for kind, layer in representatives(model).items():
        cost = layer_cost(model, layer, shape, len(combos))
        table, found = _price(scenario, combos, calibration, kind, cost)
        params = param_counts(model, layer, combos.tp, combos.ep)
        whole, cut, expert = muon_seconds(scenario, layer, calibration)
        update = (whole + cut / combos.tp, expert / combos.ep)
        boundary = _boundary_bytes(scenario, shape)
        moments = fullest(backward_moments(model, layer, shape, len(combos)))
        tables[kind] = _table(table, cost, kind, boundary, moments, params, update)
        notes.update(dict.fromkeys(found))
    return Blocks(tables, tuple(notes))


def _boundary_bytes(scenario: Scenario, shape: ShardShape) -> Array:
    """Returns the bytes of the hidden states between layers; tp ranks hold a slice each."""
    width = DTYPE_BYTES[scenario.workload.precision.compute]
    return np.asarray(
        shape.tokens * scenario.model.hidden_size * width / np.asarray(shape.tp, float)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Seconds of a layer by what they are for; forward and backward collectives by class."""

    forward: Array
    selective: Array
    full: Array
    backward: Array
    comm_forward: dict[str, Array]
    comm_backward: dict[str, Array]


def _price(
    scenario: Scenario, combos: ShardCombos, calibration: Calibration, kind: str, cost: BlockCost
) -> tuple[_Times, tuple[str, ...]]:
    times = op_seconds(cost.ops, scenario.cluster.node.gpu, calibration)
    phase = cost.ops.phase
    factor = calibration.factors.get
    again = factor("recompute", factor("forward", 1.0))
    forward_rows = phase == Phase.FORWARD
    dropped = forward_rows & np.isin(cost.ops.tag, list(SELECTIVE_TAGS))
    forward = times.seconds[forward_rows].sum(axis=0)
    backward = times.seconds[np.isin(phase, _BACKWARD)].sum(axis=0)
    comms, notes = {}, list(times.assumptions)
    for name, phases, compute in (
        ("forward", (Phase.FORWARD,), forward),
        ("backward", _BACKWARD, backward),
    ):
        comms[name], found = _comm_seconds(scenario, combos, calibration, cost, phases, compute)
        notes += found
    return _Times(
        forward=forward * factor("forward", 1.0),
        selective=times.seconds[dropped].sum(axis=0) * again,
        full=forward * again,
        backward=backward * factor("backward", 1.0),
        comm_forward=comms["forward"],
        comm_backward=comms["backward"],
    ), tuple(notes)


def _comm_seconds(
    scenario: Scenario,
    combos: ShardCombos,
    calibration: Calibration,
    cost: BlockCost,
    phases: tuple[Phase, ...],
    compute_s: Array,
) -> tuple[dict[str, Array], list[str]]:
    """Returns exposed seconds by class: what is hidden is a share, and never more than compute."""
    table, notes = cost.comms, list[str]()
    out: dict[str, Array] = {}
    for row in range(len(table)):
        if Phase(table.phase[row]) not in phases:
            continue
        cls = COMM_CLASSES[table.group[row]]
        times = collective_seconds(
            Collective(table.collective[row]),
            table.bytes[row],
            layer_group(table.group[row], combos, scenario.cluster.node.domain_gpus),
            scenario.cluster,
            calibration,
            _copies(scenario, table, row),
        )
        notes += times.assumptions
        out[cls] = out.get(cls, np.zeros(len(combos))) + times.seconds * table.count[row]
    for cls, seconds in out.items():
        hidden = np.minimum(calibration.hidden_share.get(cls, 0.0) * seconds, compute_s)
        out[cls] = (seconds - hidden) * calibration.factors.get(cls, 1.0)
    return out, notes


def layer_group(name: str, combos: ShardCombos, gpus_per_node: int) -> GroupShape:
    """Returns how a layer's group lies on the nodes (rank order of plan/mesh.py)."""
    one = np.ones(len(combos))
    size, stride = {
        "tp": (combos.tp, one),
        "cp": (combos.cp, combos.tp),
        "ep": (combos.ep, one),
    }[name]
    return group_shape(size, stride, gpus_per_node)


def _copies(scenario: Scenario, table: CommTable, row: int) -> int | None:
    """Returns how many copies of a token an expert exchange sends, where nodes are spared them."""
    moe = scenario.model.moe
    exchange = table.collective[row] == Collective.ALL_TO_ALL and table.group[row] == "ep"
    if moe is None or not exchange or scenario.cluster.node.gpu.kind == "cpu":
        return None
    return moe.top_k


def _table(
    times: _Times,
    cost: BlockCost,
    kind: str,
    boundary_bytes: Array,
    temporary_bytes: Array,
    params: ParamCounts,
    muon_s: tuple[Array, Array],
) -> BlockTable:
    """Lays the policies out: none, selective, full (only transformer layers are recomputed)."""
    layer = is_transformer_layer(kind)
    zero = np.zeros_like(times.forward)
    again = {"none": zero, "selective": times.selective, "full": times.full}
    backward = {
        "backward": np.stack([times.backward] * len(RECOMPUTES)),
        "recompute": np.stack([again[r] if layer or r != "full" else zero for r in RECOMPUTES]),
    }
    for cls in {*times.comm_forward, *times.comm_backward}:
        repeated = times.comm_forward.get(cls, zero)
        backward[cls] = np.stack(
            [
                times.comm_backward.get(cls, zero) + (repeated if r == "full" and layer else 0)
                for r in RECOMPUTES
            ]
        )
    kept = [
        _saved(cost, r if layer or r != "full" else "none", boundary_bytes) for r in RECOMPUTES
    ]
    full = kept[0][0] + kept[0][1]
    return BlockTable(
        forward={"forward": times.forward, **times.comm_forward},
        backward=backward,
        comm_bytes=_comm_bytes(cost.comms, layer),
        flops=_flops(cost, layer),
        saved_bytes=np.stack([k[0] for k in kept]),
        saved_fp8_bytes=np.stack([k[1] for k in kept]),
        recomputed_bytes=np.stack([np.maximum(full - a - b, 0) for a, b in kept]),
        temporary_bytes=temporary_bytes,
        params=params,
        muon_dense_s=muon_s[0],
        muon_expert_s=muon_s[1],
    )


def _saved(cost: BlockCost, recompute: str, boundary_bytes: Array) -> tuple[Array, Array]:
    """Returns (other, FP8-storable) bytes that a policy keeps from forward to backward."""
    lives = cost.lives
    if recompute == "full":
        return boundary_bytes, np.zeros_like(boundary_bytes)
    kept = np.ones(len(lives), bool)
    if recompute == "selective":
        kept = ~np.isin(lives.tag, list(SELECTIVE_TAGS))
    kept &= np.array([c == "activation" for c in lives.cls], bool)
    return lives.bytes[kept & ~lives.fp8].sum(axis=0), lives.bytes[kept & lives.fp8].sum(axis=0)


def _comm_bytes(comms: CommTable, layer: bool) -> dict[str, Array]:
    out: dict[str, Array] = {}
    for row in range(len(comms)):
        once = comms.bytes[row] * comms.count[row]
        twice = Phase(comms.phase[row]) is Phase.FORWARD and layer
        rows = np.stack([once * (2 if r == "full" and twice else 1) for r in RECOMPUTES])
        out[comms.group[row]] = out.get(comms.group[row], np.zeros(rows.shape)) + rows
    return out


def _flops(cost: BlockCost, layer: bool) -> Array:
    once = cost.ops.flops * cost.ops.count
    forward = cost.ops.phase == Phase.FORWARD
    selective = forward & np.isin(cost.ops.tag, list(SELECTIVE_TAGS))
    again = {"none": 0.0, "selective": once[selective].sum(axis=0)}
    again["full"] = once[forward].sum(axis=0) if layer else 0.0
    return np.stack([once.sum(axis=0) + again[r] for r in RECOMPUTES])
