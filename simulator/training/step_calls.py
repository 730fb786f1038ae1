"""The collectives that each data-parallel library makes around a step, in their order.

Only what travels: the seconds are step_end.py's, which prices ZeRO as reduce-scatter and
all-gather (arXiv 1910.02054) whatever the library.

    none        gradients in buckets of at most 25 million numbers, dense ones first
    deepspeed   (0.19.8, stage 1) gradients in buckets of at most 500 million numbers, in the
                optimizer's order; a bucket is cut where the owner changes, but its pieces are
                all-reduced together, so that every rank sends all of it; the weights of each
                of the optimizer's groups are gathered, padded to the group's ranks
    fsdp2       (stage 1) a chunk's tables and head, then layer by layer what all ranks share
                and the experts: each gathered before the chunk's first forward and scattered
                after its last backward as one, every tensor padded along its first dimension
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from flopwright.errors import Violation
from flopwright.models.moe.cost import SCORE_BINS
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.sharding import (
    Axis,
    OwnedTensor,
    axis_sizes,
    local_shape,
    owned_tensors,
    tensor_cuts,
)
from flopwright.simulator.memory.stages import DEEPSPEED_BUCKET, PLAIN_BUCKET
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.parameters import EMBEDDING_LAYER
from flopwright.spec.scenario import Scenario

Sent = tuple[str, str, int]  # collective, group, bytes

_NORM_BYTES: Final = DTYPE_BYTES["fp64"]  # the squared norm of the gradients
_LOAD_BYTES: Final = DTYPE_BYTES["int64"]  # tokens of one expert in a step
_ALIGNED_TO: Final = 2  # numbers a rank, in DeepSpeed's flat groups
_FIRST: Final[dict[Axis, int]] = {"tp": 0, "ep": 0, "etp": 0}  # the places of a group's first rank


def step_end_calls(
    scenario: Scenario, plan: ParallelPlan, stage: int, action: Action
) -> Iterator[Sent]:
    """Yields what an action that moves gradients or weights, or updates them, sends."""
    data = _Data(scenario, plan, stage)
    zero = plan.zero_stage > 0 and plan.dp_shard * plan.cp > 1
    fsdp2 = zero and plan.data_parallel == "fsdp2"
    precision = scenario.workload.precision
    if action.kind is ActionKind.GATHER_WEIGHTS and fsdp2:
        yield from data.units("all_gather", action.chunk, DTYPE_BYTES[precision.weights])
    elif action.kind is ActionKind.REDUCE_GRADIENTS and fsdp2:
        yield from data.units("reduce_scatter", action.chunk, DTYPE_BYTES[precision.gradients])
    elif action.kind is ActionKind.REDUCE_GRADIENTS:
        yield from data.partial_sums()
        yield from data.deepspeed_reduces() if zero else data.plain_reduces(action.chunk)
    elif action.kind is ActionKind.OPTIMIZER_STEP:
        if fsdp2:
            yield from data.partial_sums(sharded=True)
        if plan.world_size > 1:
            yield "all_reduce", "world", _NORM_BYTES
        if zero and not fsdp2:
            yield from data.deepspeed_gathers()
        yield from data.loads()


def unlisted(scenario: Scenario, plan: ParallelPlan) -> list[Violation]:
    """Returns what a plan asks for whose messages are in no list here."""
    optimizer, moved = scenario.workload.optimizer, "its messages are in no list to compare with"
    away = plan.optimizer_offload or plan.gradient_offload or plan.parameter_offload
    hybrid = plan.data_parallel == "fsdp2" and plan.dp_replicate > 1
    asked = (
        ("parallel.zero_stage", plan.zero_stage > 1, str(plan.zero_stage), "use 0 or 1"),
        ("parallel.dp_replicate", hybrid, str(plan.dp_replicate), "use 1"),
        ("parallel.cp", plan.cp > 1, str(plan.cp), "use 1"),
        ("parallel.etp", plan.etp > 1, str(plan.etp), "use 1"),
        ("parallel.optimizer_offload", away, "true", "keep the states on the rank"),
        ("workload.optimizer.kind", optimizer.kind != "adamw", optimizer.kind, "use adamw"),
    )
    return [
        Violation(field=field, value=value, rule=f"no dry run: {moved}", nearest_fix=fix)
        for field, on, value, fix in asked
        if on
    ]


@dataclass(frozen=True, slots=True)
class _Data:
    """A stage's tensors on their way."""

    scenario: Scenario
    plan: ParallelPlan
    stage: int

    def _tensors(self) -> tuple[OwnedTensor, ...]:
        """Returns the trained tensors of a rank, in model order."""
        owned = owned_tensors(self.scenario.model, self.plan, self.stage)
        return tuple(t for t in owned if t.param.trainable and not t.param.tied)

    def _apart(self, tensor: OwnedTensor) -> bool:
        plan = self.plan
        return tensor.expert and plan.ep * plan.etp * plan.tp > 1

    def _size(self, group: str) -> int:
        plan = self.plan
        dense = plan.cp * (plan.dp_shard if "shard" in group else plan.dp)
        return dense * plan.tp // (plan.ep * plan.etp) if group.startswith("edp") else dense

    def units(self, collective: str, chunk: int, width: int) -> Iterator[Sent]:
        """Yields one collective for each part of a chunk that FSDP2 moves as one."""
        layers = self.plan.chunk_layers(self.scenario.model.num_layers)[chunk]
        owned = [t for t in self._tensors() if self._on(t.param.layer, chunk)]
        tables = [t for t in owned if t.param.layer not in layers]
        for unit in (tables, *([t for t in owned if t.param.layer == n] for n in layers)):
            for apart, group in ((False, "dp_shard_cp"), (True, "edp_shard")):
                ranks = self._size(group)
                numel = sum(self._padded(t, ranks) for t in unit if self._apart(t) is apart)
                if numel and ranks > 1:
                    yield collective, group, numel * width

    def _on(self, layer: int, chunk: int) -> bool:
        last = self.plan.num_chunks - 1
        if layer == EMBEDDING_LAYER or layer >= self.scenario.model.num_layers:
            return chunk == (0 if layer == EMBEDDING_LAYER else last)
        return layer in self.plan.chunk_layers(self.scenario.model.num_layers)[chunk]

    def _padded(self, tensor: OwnedTensor, ranks: int) -> int:
        first = local_shape(tensor.param, axis_sizes(self.plan), _FIRST)[0]
        return -(-first // ranks) * ranks * (tensor.numel // first)

    def partial_sums(self, *, sharded: bool = False) -> Iterator[Sent]:
        """Yields the sums over ranks that under sequence parallelism saw other tokens.

        Args:
            sharded: of a data-parallel rank's part.
        """
        if self.plan.tp == 1 or not self.plan.sequence_parallel:
            return
        width = DTYPE_BYTES[self.scenario.workload.precision.gradients]
        ranks = self._size("dp_shard_cp") if sharded else 1
        whole = [
            self._padded(t, ranks) // ranks
            for t in self._tensors()
            if not t.expert and not tensor_cuts(t.param)
        ]
        for bucket in _buckets(whole, PLAIN_BUCKET):
            yield "all_reduce", "tp", sum(bucket) * width

    def plain_reduces(self, chunk: int) -> Iterator[Sent]:
        width = DTYPE_BYTES[self.scenario.workload.precision.gradients]
        mine = [t for t in self._tensors() if chunk < 0 or self._on(t.param.layer, chunk)]
        for apart, group in ((False, "dp_cp"), (True, "edp")):
            numels = [t.numel for t in mine if self._apart(t) is apart]
            if self._size(group) > 1:
                for bucket in _buckets(numels, PLAIN_BUCKET):
                    yield "all_reduce", group, sum(bucket) * width

    def _groups(self) -> list[tuple[str, list[int]]]:
        """Returns (group of ranks, numbers of each tensor) of each of the optimizer's groups."""
        muon = self.scenario.workload.optimizer.kind == "muon"
        found: dict[tuple[bool, bool, bool], list[int]] = {}
        for t in self._tensors():
            key = (self._apart(t), muon and t.param.is_matrix, len(t.param.shape) >= 2)
            found.setdefault(key, []).append(t.numel)
        return [("edp" if key[0] else "dp_cp", found[key]) for key in sorted(found)]

    def deepspeed_reduces(self) -> Iterator[Sent]:
        groups = self._groups()
        total = sum(sum(numels) for _, numels in groups)
        most = min(DEEPSPEED_BUCKET, total)
        pieces = [
            (group, piece)
            for group, numels in groups
            for piece in self._cut(numels, self._size(group))
        ]
        bucket: list[tuple[str, list[int]]] = []
        for group, piece in pieces:
            if bucket and sum(sum(p) for _, p in bucket) + sum(piece) > most:
                yield from self._average(bucket, most)
                bucket = []
            bucket.append((group, piece))
        yield from self._average(bucket, most)

    def _cut(self, numels: list[int], ranks: int) -> Iterator[list[int]]:
        """Yields each tensor of a flat group as the pieces that fall to different owners."""
        share, start = _aligned(sum(numels), ranks) // ranks, 0
        for numel in numels:
            ends = range((start // share + 1) * share, start + numel, share)
            marks = [start, *ends, start + numel]
            yield [b - a for a, b in pairwise(marks)]
            start += numel

    def _average(self, bucket: list[tuple[str, list[int]]], most: int) -> Iterator[Sent]:
        width = DTYPE_BYTES[self.scenario.workload.precision.gradients]
        by_group: dict[str, list[int]] = {}
        for group, pieces in bucket:
            by_group.setdefault(group, []).extend(pieces)
        for group, pieces in by_group.items():
            run = 0
            for piece in pieces:
                run += piece
                if run > most:
                    yield "all_reduce", group, run * width
                    run = 0
            if run:
                yield "all_reduce", group, run * width

    def deepspeed_gathers(self) -> Iterator[Sent]:
        width = DTYPE_BYTES[self.scenario.workload.precision.weights]
        for group, numels in self._groups():
            if self._size(group) > 1:
                yield "all_gather", group, _aligned(sum(numels), self._size(group)) * width

    def loads(self) -> Iterator[Sent]:
        """Yields the sums from which the routers' biases move: loads, and histograms of scores."""
        moe = self.scenario.model.moe
        routers = sum(t.param.name.endswith(".gate.weight") for t in self._tensors())
        if moe is None or not routers:
            return
        for each in (1, SCORE_BINS) if moe.balance == "quantile" else (1,):
            nbytes = routers * moe.num_experts * each * _LOAD_BYTES
            if self._size("dp_cp") > 1:
                yield "all_reduce", "dp_cp", nbytes
            if self.plan.tp > 1 and self.plan.sequence_parallel:
                yield "all_reduce", "tp", nbytes


def _buckets(numels: list[int], most: int) -> Iterator[list[int]]:
    bucket: list[int] = []
    for numel in numels:
        if bucket and sum(bucket) + numel > most:
            yield bucket
            bucket = []
        bucket.append(numel)
    if bucket:
        yield bucket


def _aligned(numel: int, ranks: int) -> int:
    step = _ALIGNED_TO * ranks
    return -(-numel // step) * step
