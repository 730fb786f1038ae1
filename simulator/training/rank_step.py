"""What one rank does in one step, as lists: what a dry run of the executor is compared with.

The tables that price a step (models/, one micro-batch of one layer) are written out along
the rank's lowered list: which collectives each action starts, in which order and with how many
bytes, and which matrix products it runs. Memory is the prediction's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Final

import numpy as np

from flopwright.errors import InputError
from flopwright.models.transformer.cost import layer_cost
from flopwright.ops import BlockCost, Collective, OpKind, Phase
from flopwright.plan.hops import states_into_chunks
from flopwright.plan.lower import lower
from flopwright.plan.mesh import Mesh
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.report.rank_step import Call, Product, RankStep
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.combos import ShardCombos, shard_combos, shard_shape
from flopwright.simulator.training.evaluate import memory_of
from flopwright.simulator.training.layers import kind_of
from flopwright.simulator.training.predict import plan_costs
from flopwright.simulator.training.recipes import with_recipe
from flopwright.simulator.training.recompute import (
    Policy,
    exchanged_again,
    policy_index,
    run_again,
)
from flopwright.simulator.training.step_calls import step_end_calls
from flopwright.simulator.training.transfers import send_bytes
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.parameters import EMBEDDING_LAYER
from flopwright.spec.scenario import Scenario

# Phases of a layer's rows that run in each kind of action, the later ones first where the
# layers themselves come in reverse.
_PHASES: Final = {
    ActionKind.FORWARD: (Phase.FORWARD,),
    ActionKind.RECOMPUTE: (Phase.FORWARD,),
    ActionKind.BACKWARD: (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT),
    ActionKind.BACKWARD_INPUT: (Phase.BACKWARD_INPUT,),
    ActionKind.BACKWARD_WEIGHT: (Phase.BACKWARD_WEIGHT,),
}
_KERNELS: Final = {
    OpKind.GEMM: "gemm",
    OpKind.GROUPED_GEMM: "grouped_gemm",
    OpKind.ATTENTION: "attention",
}
_MESSAGES: Final = {
    ActionKind.SEND_FORWARD: "send",
    ActionKind.SEND_BACKWARD: "send",
    ActionKind.RECV_FORWARD: "recv",
    ActionKind.RECV_BACKWARD: "recv",
}
# What an all-to-all of rows is preceded by: how many rows of each expert come.
_DISPATCH: Final = "mlp.dispatch"
_COUNT_BYTES: Final = DTYPE_BYTES["int64"]

_OfChunk = tuple[ActionKind, str, tuple[int, ...], int]  # and collective, ranks, bytes


def rank_step(
    scenario: Scenario, plan: ParallelPlan, rank: int, calibration: Calibration | None = None
) -> RankStep:
    """Returns what rank `rank` of the plan does in one step.

    Args:
        calibration: as for `predict`.

    Raises:
        InputError: every rule of shape that the plan breaks.
    """
    broken = plan_violations(plan, scenario)
    if broken:
        raise InputError(broken)
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    lists = _Lists(scenario, plan, rank, calibration)
    found = memory_of(scenario, plan_costs(scenario, plan, calibration), calibration)
    memory = {
        name: int(values[lists.stage, 0])
        for name, values in found.classes.items()
        if name != "reserved"
    }
    return RankStep(
        rank=rank,
        stage=lists.stage,
        actions=tuple(map(str, lists.actions)),
        calls=tuple(lists.calls()),
        products=lists.products(),
        flops=lists.flops(),
        memory_bytes=memory,
        peak_bytes=sum(memory.values()),
    )


@dataclass(frozen=True)
class _Lists:
    """A rank's lists in the making."""

    scenario: Scenario
    plan: ParallelPlan
    rank: int
    calibration: Calibration

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(self.plan)

    @cached_property
    def stage(self) -> int:
        return self.mesh.coordinates(self.rank)["pp"]

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        batch = self.scenario.workload.global_batch_size
        return lower(self.plan, self.plan.num_microbatches(batch))[self.stage]

    @cached_property
    def _combos(self) -> ShardCombos:
        return shard_combos(self._candidates)

    @cached_property
    def _candidates(self) -> Candidates:
        return Candidates.from_plans([self.plan])

    @cached_property
    def _policy(self) -> Policy:
        return self._combos.policies[int(policy_index(self._candidates)[0])]

    def calls(self) -> Iterator[Call]:
        """Yields the communication of every action, in order."""
        known: dict[tuple[ActionKind, int], tuple[_OfChunk, ...]] = {}
        for action in self.actions:
            name = str(action)
            if action.kind in _MESSAGES:
                yield self._message(action)
            elif action.kind in _PHASES:
                key = (action.kind, action.chunk)
                if key not in known:
                    known[key] = tuple(self._of_chunk(action))
                place = f"({action.chunk},{action.microbatch})"
                for kind, collective, ranks, nbytes in known[key]:
                    yield Call(f"{kind.value}{place}", collective, ranks, nbytes)
            else:
                for collective, group, nbytes in step_end_calls(
                    self.scenario, self.plan, self.stage, action
                ):
                    yield Call(name, collective, self._group(group), nbytes)

    def _message(self, action: Action) -> Call:
        pipeline = self._group("pp")
        kind, peer = _MESSAGES[action.kind], pipeline[action.peer]
        ends = (self.rank, peer) if kind == "send" else (peer, self.rank)
        nbytes = int(send_bytes(self.scenario, self._combos)[0])
        states = states_into_chunks(self.scenario.model, self.plan)
        if states:
            behind = action.kind in {ActionKind.SEND_FORWARD, ActionKind.RECV_BACKWARD}
            nbytes *= states[action.chunk + behind]
        return Call(str(action), kind, ends, nbytes)

    def _of_chunk(self, action: Action) -> Iterator[_OfChunk]:
        """Yields what one micro-batch of a chunk sends in an action.

        What is made again is made layer by layer, inside the backward that needs it.
        """
        kind, layers = action.kind, self._layers(action.chunk)
        if kind is ActionKind.RECOMPUTE:
            return
        if kind is ActionKind.FORWARD:
            for layer in layers:
                yield from self._of_layer(layer, kind)
            return
        for layer in reversed(layers):
            if kind is not ActionKind.BACKWARD_WEIGHT:
                yield from self._of_layer(layer, ActionKind.RECOMPUTE)
            yield from self._of_layer(layer, kind)

    def _of_layer(self, layer: int, kind: ActionKind) -> Iterator[_OfChunk]:
        cost, layer_kind = self._cost(layer), kind_of(self.scenario.model, layer)
        comms, phases = cost.comms, _PHASES[kind]
        rows = [
            i for i in range(len(comms)) if comms.count[i, 0] and Phase(comms.phase[i]) in phases
        ]
        if kind is ActionKind.RECOMPUTE:
            again = exchanged_again(cost, self._policy.of(layer_kind), layer_kind)
            rows = [i for i in rows if again[i]]
        for i in rows if phases == (Phase.FORWARD,) else _backwards(rows, comms.name):
            for collective, ranks, nbytes in self._row(cost, i):
                yield kind, collective, ranks, nbytes

    def _row(self, cost: BlockCost, row: int) -> Iterator[tuple[str, tuple[int, ...], int]]:
        comms = cost.comms
        ranks = self._group(comms.group[row])
        forward = Phase(comms.phase[row]) is Phase.FORWARD
        if comms.name[row] == _DISPATCH and forward:
            moe = self.scenario.model.moe
            assert moe is not None
            counts = moe.num_experts * _COUNT_BYTES
            yield "all_to_all", ranks, counts - counts // len(ranks)
        collective = Collective(comms.collective[row]).name.lower()
        for _ in range(int(comms.count[row, 0])):
            yield collective, ranks, round(comms.bytes[row, 0])

    @cached_property
    def _known_groups(self) -> dict[str, tuple[int, ...]]:
        return {}

    def _group(self, name: str) -> tuple[int, ...]:
        if name not in self._known_groups:
            self._known_groups[name] = self.mesh.group_of(name, self.rank)
        return self._known_groups[name]

    def products(self) -> Counter[Product]:
        """Returns how often each shape of product runs."""
        out: Counter[Product] = Counter()
        for (kind, chunk), times in self._computes().items():
            for layer in self._layers(chunk):
                for product, count, _ in self._rows(kind, layer):
                    out[product] += count * times
        return out

    def flops(self) -> dict[str, float]:
        """Returns executed FLOPs by kernel."""
        out: Counter[str] = Counter()
        for (kind, chunk), times in self._computes().items():
            for layer in self._layers(chunk):
                for product, count, flops in self._rows(kind, layer):
                    out[product.kernel] += flops * count * times  # type: ignore[assignment]
        return dict(out)

    def _computes(self) -> Counter[tuple[ActionKind, int]]:
        return Counter((a.kind, a.chunk) for a in self.actions if a.kind in _PHASES)

    def _rows(self, kind: ActionKind, layer: int) -> Iterator[tuple[Product, int, float]]:
        cost, layer_kind = self._cost(layer), kind_of(self.scenario.model, layer)
        ops = cost.ops
        phases = [Phase(p) in _PHASES[kind] for p in ops.phase]
        rows = np.array(phases) & (ops.count[:, 0] > 0) & (ops.flops[:, 0] > 0)
        if kind is ActionKind.RECOMPUTE:
            rows &= run_again(cost, self._policy.of(layer_kind), layer_kind)
        for i in np.flatnonzero(rows):
            kernel = _KERNELS.get(OpKind(ops.kind[i]))
            if kernel is not None:
                shape = (round(float(x[i, 0])) for x in (ops.m, ops.k, ops.n, ops.batch))
                product = Product(kind.value, kernel, ops.dtype[i], *shape)
                yield product, round(float(ops.count[i, 0])), float(ops.flops[i, 0])

    def _layers(self, chunk: int) -> list[int]:
        spec = self.scenario.model
        layers = list(self.plan.chunk_layers(spec.num_layers)[chunk])
        if chunk == 0:
            layers.insert(0, EMBEDDING_LAYER)
        if chunk == self.plan.num_chunks - 1:
            layers.extend(range(spec.num_layers, spec.num_layers + 1 + spec.mtp_layers))
        return layers

    @cached_property
    def _costs(self) -> dict[str, BlockCost]:
        return {}

    def _cost(self, layer: int) -> BlockCost:
        kind, precision = kind_of(self.scenario.model, layer), self.scenario.workload.precision
        if kind not in self._costs:
            shape = shard_shape(self.scenario, self._combos, self.calibration)
            cost = layer_cost(self.scenario.model, layer, shape)
            self._costs[kind] = with_recipe(cost, precision.gemm, precision.compute, kind)
        return self._costs[kind]


def _backwards(rows: Sequence[int], names: Sequence[str]) -> list[int]:
    """Returns the rows from the last name to the first, those of one name as they stand.

    An op's input gradient is sent on its way before its weight's gradient asks for more.
    """
    together = [list(same) for _, same in groupby(rows, key=lambda row: names[row])]
    return [row for same in reversed(together) for row in same]
