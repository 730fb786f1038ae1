"""What one layer of each kind costs in time and memory, for every distinct shard shape.

Thousands of plans share a few dozen combinations of micro-batch, tp, ep and cp: each kind of
layer is priced once a combination, and plans pick their columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.models.temporaries.cost import backward_moments, fullest
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import Array, BlockCost, CommTable, OpKind, Phase
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.parameters import ParamCounts, param_counts
from flopwright.simulator.operators.times import op_seconds
from flopwright.simulator.training.combos import ShardCombos as ShardCombos
from flopwright.simulator.training.combos import shard_combos as shard_combos
from flopwright.simulator.training.combos import shard_shape
from flopwright.simulator.training.kernels import kernel_classes, scaled_seconds
from flopwright.simulator.training.layer_comms import CommSeconds, comm_seconds
from flopwright.simulator.training.layers import representatives
from flopwright.simulator.training.lora import trained_counts, with_adapters
from flopwright.simulator.training.optimizer import UpdateRates, muon_seconds, update_rates
from flopwright.simulator.training.recipes import with_recipe
from flopwright.simulator.training.recompute import (
    Bools,
    Policy,
    exchanged_again,
    kept,
    run_again,
)
from flopwright.spec.scenario import Scenario

_BACKWARD = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockTable:
    """One layer kind, one micro-batch, one rank. U combinations, R recompute policies.

    Attributes:
        forward, backward, weight: seconds of compute, (U,); the last is the part of backward
            that makes weight gradients.
        recompute: seconds of what runs again, (R, U).
        comm_forward, comm_backward: seconds of collectives by class, nothing hidden, (U,) and
            with what a policy repeats (R, U).
        kernels: seconds of forward, backward and recompute by kernel class, (R, U).
        comm_bytes: payload by group, each (R, U).
        flops: executed (R, U).
        saved_bytes, saved_fp8_bytes: kept from forward to backward, (R, U); the second part
            is what FP8 activation storage applies to.
        recomputed_bytes: what is made again while the layer runs backward, (R, U).
        temporary_bytes: the fullest moment of its backward beyond what it kept, (U,).
        muon_dense_s, muon_expert_s: seconds of orthogonalising the layer's matrices on one
            rank that held them alone, (U,).
    """

    forward: Array
    backward: Array
    weight: Array
    recompute: Array
    comm_forward: dict[str, Array]
    comm_backward: dict[str, Array]
    kernels: dict[str, Array]
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
    """Tables by layer kind, in the order of `representatives`, and what was assumed.

    `update` is what updating weights takes, whatever layers they are of.
    """

    tables: dict[str, BlockTable]
    update: UpdateRates
    assumptions: tuple[str, ...]


def price_blocks(scenario: Scenario, combos: ShardCombos, calibration: Calibration) -> Blocks:
    """Returns the cost of one layer of every kind for every combination.

    Raises:
        InputError: an operator of a class or dtype that nothing prices.
    """
    tables, notes = {}, dict[str, None]()
    for kind, layer in representatives(scenario.model).items():
        block = _Block(scenario, combos, calibration, kind, layer)
        table, found = block.table()
        tables[kind] = table
        notes.update(dict.fromkeys(found))
    return Blocks(tables, update_rates(scenario, calibration), tuple(notes))


@dataclass(frozen=True, slots=True)
class _Block:
    """One kind of layer on its way to a table."""

    scenario: Scenario
    combos: ShardCombos
    calibration: Calibration
    kind: str
    layer: int

    def table(self) -> tuple[BlockTable, tuple[str, ...]]:
        """Returns the table, and what it assumes."""
        combos, spec = self.combos, self.scenario.model
        shape = shard_shape(self.scenario, combos, self.calibration)
        cost = self._cost(layer_cost(spec, self.layer, shape, len(combos)))
        again = [run_again(cost, p.of(self.kind), self.kind) for p in combos.policies]
        comms = comm_seconds(self.scenario, combos, self.calibration, cost.comms)
        seconds, notes = self._seconds(cost)
        saved = self._saved(cost)
        everything = saved[0][0] + saved[0][1]
        whole, cut, expert = muon_seconds(self.scenario, self.layer, self.calibration)
        moments = backward_moments(spec, self.layer, shape, len(combos))
        return BlockTable(
            **self._compute(cost, seconds, again),
            comm_forward=comms.forward,
            comm_backward=self._repeated(comms, cost),
            kernels=self._kernels(cost, seconds, again),
            comm_bytes=self._comm_bytes(cost),
            flops=self._flops(cost, again),
            saved_bytes=np.stack([k[0] for k in saved]),
            saved_fp8_bytes=np.stack([k[1] for k in saved]),
            recomputed_bytes=np.stack([np.maximum(everything - a - b, 0) for a, b in saved]),
            temporary_bytes=fullest(moments),
            params=self._params(),
            muon_dense_s=whole + cut / combos.tp,
            muon_expert_s=expert / combos.ep,
        ), (*notes, *comms.assumptions)

    def _cost(self, cost: BlockCost) -> BlockCost:
        """Returns the block as the workload trains it: adapters, and products in a format."""
        workload = self.scenario.workload
        precision = workload.precision
        cost = with_adapters(
            cost, workload.lora_rank, precision.compute, self.kind, workload.lora_targets
        )
        return with_recipe(cost, precision.gemm, precision.compute, self.kind)

    def _params(self) -> ParamCounts:
        combos, spec = self.combos, self.scenario.model
        ep = combos.ep * combos.etp
        counts = param_counts(spec, self.layer, combos.tp, ep)
        work = self.scenario.workload
        rank, targets = work.lora_rank, work.lora_targets
        return trained_counts(spec, self.layer, counts, combos.tp, ep, rank, targets)

    def _seconds(self, cost: BlockCost) -> tuple[Array, tuple[str, ...]]:
        gpu = self.scenario.cluster.node.gpu
        times = op_seconds(cost.ops, gpu, self.calibration)
        classes = kernel_classes(cost.ops, self.kind)
        scaled = scaled_seconds(times.seconds, cost.ops, classes, self.calibration)
        return scaled, times.assumptions

    def _compute(self, cost: BlockCost, seconds: Array, again: list[Bools]) -> dict[str, Array]:
        """Returns seconds of compute with the factors of their time classes."""
        phase, factor = cost.ops.phase, self.calibration.factors.get
        repeats = factor("recompute", factor("forward", 1.0))
        weight = seconds[phase == Phase.BACKWARD_WEIGHT].sum(axis=0)
        backward = seconds[np.isin(phase, _BACKWARD)].sum(axis=0)
        return {
            "forward": seconds[phase == Phase.FORWARD].sum(axis=0) * factor("forward", 1.0),
            "backward": backward * factor("backward", 1.0),
            "weight": weight * factor("backward", 1.0),
            "recompute": np.stack([seconds[rows].sum(axis=0) for rows in again]) * repeats,
        }

    def _kernels(self, cost: BlockCost, seconds: Array, again: list[Bools]) -> dict[str, Array]:
        classes = np.array(kernel_classes(cost.ops, self.kind))
        out = {}
        for name in dict.fromkeys(classes.tolist()):
            mine = classes == name
            once = seconds[mine].sum(axis=0)
            out[name] = np.stack([once + seconds[mine & rows].sum(axis=0) for rows in again])
        return out

    def _repeated(self, comms: CommSeconds, cost: BlockCost) -> dict[str, Array]:
        """Returns the collectives of the backward, with those that a policy repeats, (R, U)."""
        out = {
            cls: np.stack([comms.backward.get(cls, 0.0 * s)] * len(self.combos.policies))
            for cls, s in (comms.forward | comms.backward).items()
        }
        for r, rows in enumerate(self._exchanges(cost)):
            for row in np.flatnonzero(rows & cost.comms.count.any(axis=1)):
                out[comms.cls[row]][r] += comms.seconds[row]
        return out

    def _exchanges(self, cost: BlockCost) -> list[Bools]:
        policies = self.combos.policies
        return [exchanged_again(cost, p.of(self.kind), self.kind) for p in policies]

    def _saved(self, cost: BlockCost) -> list[tuple[Array, Array]]:
        """Returns (other, FP8-storable) bytes that each policy keeps until the backward."""
        return [self._kept(cost, p.of(self.kind)) for p in self.combos.policies]

    def _kept(self, cost: BlockCost, policy: Policy) -> tuple[Array, Array]:
        lives = cost.lives
        if policy.name == "full":
            boundary = next(i for i, n in enumerate(lives.name) if n == "input")
            return lives.bytes[boundary], np.zeros(len(self.combos))
        mine = kept(cost, policy, self.kind)
        return lives.bytes[mine & ~lives.fp8].sum(axis=0), lives.bytes[mine & lives.fp8].sum(
            axis=0
        )

    def _comm_bytes(self, cost: BlockCost) -> dict[str, Array]:
        comms: CommTable = cost.comms
        repeats = np.stack(self._exchanges(cost)).astype(float)
        out: dict[str, Array] = {}
        for row in range(len(comms)):
            if not comms.count[row].any():
                continue
            once = comms.bytes[row] * comms.count[row]
            rows = once * (1 + repeats[:, row])[:, None]
            out[comms.group[row]] = out.get(comms.group[row], np.zeros(rows.shape)) + rows
        return out

    def _flops(self, cost: BlockCost, again: list[Bools]) -> Array:
        """Returns executed FLOPs, those of the mean rank where experts are uneven, (R, U)."""
        once = cost.ops.flops * cost.ops.count
        if self.scenario.workload.expert_load.kind == "power_law":
            load = np.asarray(
                shard_shape(self.scenario, self.combos, self.calibration).expert_load
            )
            grouped = (cost.ops.kind == OpKind.GROUPED_GEMM)[:, None]
            once = np.where(grouped, once / load, once)
        return np.stack([once.sum(axis=0) + once[rows].sum(axis=0) for rows in again])
