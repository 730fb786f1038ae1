"""Plans with the same pipeline: what each chunk of layers costs, and each stage's step end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array, Collective
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import GroupShape
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.training.blocks import Blocks, BlockTable, ShardCombos
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.layers import chunk_kinds
from flopwright.simulator.training.optimizer import host_link
from flopwright.simulator.training.step_end import StepEnd, step_end
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario

Classes = dict[str, Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """C plans with one pp, vpp and layout. Chunk axes first, candidates last.

    Attributes:
        forward, backward: exposed seconds of one micro-batch by time class, (chunks, C).
        send_s: seconds of moving a micro-batch between chunk c and c + 1, (chunks, C); 0
            where both stand on one stage and for the last chunk.
        saved_bytes, saved_fp8_bytes: kept by a chunk for one micro-batch, (chunks, C).
        backward_bytes: the fullest moment of the chunk's backward beyond what it kept, what
            is made again included, (chunks, C).
        params: numbers a rank of each stage holds, (pp, C).
        flops: executed by a rank of each chunk for one micro-batch, (chunks, C).
        comm_bytes: payload by group for one micro-batch, summed over a stage, (pp, C).
    """

    pp: int
    vpp: int
    candidates: Candidates
    combos: ShardCombos
    forward: Classes
    backward: Classes
    send_s: Array
    send_bytes: Array
    saved_bytes: Array
    saved_fp8_bytes: Array
    backward_bytes: Array
    params: ParamCounts
    flops: Array
    comm_bytes: Classes
    end: StepEnd
    assumptions: tuple[str, ...]

    @property
    def forward_s(self) -> Array:
        """Seconds of a chunk's forward, all classes together."""
        return np.asarray(sum(self.forward.values()))

    @property
    def backward_s(self) -> Array:
        """Seconds of a chunk's backward, all classes together."""
        return np.asarray(sum(self.backward.values()))


def pipeline_costs(
    scenario: Scenario,
    candidates: Candidates,
    combos: ShardCombos,
    blocks: Blocks,
    calibration: Calibration,
) -> PipelineCosts:
    """Returns the costs of candidates that share pp, vpp and layout.

    Args:
        combos: with the `index` of exactly these candidates.
    """
    pp, vpp = int(candidates.pp[0]), int(candidates.vpp[0])
    layout = candidates.layouts[candidates.layout[0]] if candidates.layout[0] >= 0 else None
    kinds = chunk_kinds(scenario.model, pp, vpp, layout)
    pick = _Picker(kinds, list(blocks.tables.values()), candidates.recompute, combos.index)
    share = core_share(scenario, candidates, calibration)
    forward = {k: v * share for k, v in pick.classes("forward").items()}
    backward = {k: v * share for k, v in pick.classes("backward").items()}
    saved, fp8 = pick.ruled("saved_bytes"), pick.ruled("saved_fp8_bytes")
    offload = _offload(scenario, candidates, calibration, saved, fp8, forward, backward)
    forward.update(offload[0])
    backward.update(offload[1])
    params = _with_tied_head(scenario, candidates, pick.params(pp, vpp))
    last_backward = np.asarray(sum(backward.values()))[:pp]
    muon_s = (pick.staged("muon_dense_s", pp, vpp), pick.staged("muon_expert_s", pp, vpp))
    end = step_end(scenario, candidates, calibration, params, last_backward, muon_s)
    if end.micro_s.any():
        backward["dp_comm"] = np.tile(end.micro_s / vpp, (vpp, 1))
    send_bytes = _send_bytes(scenario, combos)
    send_s, notes = _send_seconds(scenario, candidates, calibration, send_bytes)
    return PipelineCosts(
        pp=pp,
        vpp=vpp,
        candidates=candidates,
        combos=combos,
        forward=forward,
        backward=backward,
        send_s=send_s,
        send_bytes=send_bytes,
        saved_bytes=saved,
        saved_fp8_bytes=fp8,
        backward_bytes=pick.fullest_backward(_tied_bytes(scenario, candidates)),
        params=params,
        flops=pick.ruled("flops"),
        comm_bytes=pick.comm_bytes(pp, vpp),
        end=end,
        assumptions=(*blocks.assumptions, *end.assumptions, *notes),
    )


@dataclass(frozen=True, slots=True)
class _Picker:
    """Sums layer tables over the layers of chunks, for each candidate's column and policy."""

    kinds: NDArray[np.int64]
    tables: list[BlockTable]
    policy: NDArray[np.int64]
    column: NDArray[np.int64]

    def _sum(self, columns: list[Array]) -> Array:
        """Returns sum over kinds of count (kinds, chunks) times values (C,): (chunks, C)."""
        return np.asarray(self.kinds.T.astype(float) @ np.stack(columns))

    def ruled(self, name: str) -> Array:
        """Returns a table that depends on the recompute policy, summed over layers."""
        return self._sum([getattr(t, name)[self.policy, self.column] for t in self.tables])

    def fullest_backward(self, tied: Array) -> Array:
        """Returns the most bytes a chunk's backward holds at once beyond what it kept.

        It runs from the head down, and what a layer kept is gone once it is done.

        Args:
            tied: bytes of the shared table's gradient, (C,): the head's waits for the
                embedding's where one chunk holds both.
        """
        column, policy = self.column, self.policy
        needs = np.stack(
            [t.recomputed_bytes[policy, column] + t.temporary_bytes[column] for t in self.tables]
        )
        kept = np.stack([(t.saved_bytes + t.saved_fp8_bytes)[policy, column] for t in self.tables])
        present = (self.kinds > 0)[:, :, None]
        layers = np.where(present, needs[:, None, :], 0.0)[1:-1].max(axis=0, initial=0.0)
        whole = self.kinds.T.astype(float) @ kept
        table = np.where(present[0], needs[0] - whole, -np.inf)
        after = np.maximum(layers - present[-1] * kept[-1], table)
        after = after + np.where(present[0] & present[-1], tied, 0.0)
        return np.asarray(np.maximum(after, present[-1] * needs[-1]).clip(0.0))

    def classes(self, side: str) -> Classes:
        """Returns seconds by time class of the forward or backward of each chunk."""
        names = dict.fromkeys(name for t in self.tables for name in getattr(t, side))
        zero = np.zeros(len(self.column))
        out = {}
        for name in names:
            columns = []
            for table in self.tables:
                values = getattr(table, side).get(name)
                if values is None:
                    columns.append(zero)
                elif values.ndim == 1:
                    columns.append(values[self.column])
                else:
                    columns.append(values[self.policy, self.column])
            out[name] = self._sum(columns)
        return out

    def comm_bytes(self, pp: int, vpp: int) -> Classes:
        """Returns payload by group of one micro-batch, by stage."""
        names = dict.fromkeys(name for t in self.tables for name in t.comm_bytes)
        zero = np.zeros((1, 1))
        out = {}
        for name in names:
            values = [
                np.broadcast_to(t.comm_bytes.get(name, zero), t.flops.shape) for t in self.tables
            ]
            summed = self._sum([v[self.policy, self.column] for v in values])
            out[name] = summed.reshape(vpp, pp, -1).sum(axis=0)
        return out

    def staged(self, name: str, pp: int, vpp: int) -> Array:
        """Returns a table that no policy changes, summed over the layers of each stage."""
        summed = self._sum([getattr(t, name)[self.column] for t in self.tables])
        return np.asarray(summed.reshape(vpp, pp, -1).sum(axis=0))

    def params(self, pp: int, vpp: int) -> ParamCounts:
        """Returns the numbers a rank of each stage holds."""
        out = {}
        for name in ("held", "dense", "dense_matrix", "expert"):
            summed = self._sum([getattr(t.params, name)[self.column] for t in self.tables])
            out[name] = summed.reshape(vpp, pp, -1).sum(axis=0)
        return ParamCounts(**out)


def _tied_bytes(scenario: Scenario, candidates: Candidates) -> Array:
    """Returns the bytes of the gradient of a table that embedding and head share, (C,)."""
    model, width = scenario.model, DTYPE_BYTES[scenario.workload.precision.compute]
    table = model.vocab_size * model.hidden_size * width / candidates.tp
    return np.asarray(table if model.tied_embeddings else 0 * table)


def _with_tied_head(
    scenario: Scenario, candidates: Candidates, params: ParamCounts
) -> ParamCounts:
    """Adds the table's second copy where the head that shares it stands on another stage."""
    model = scenario.model
    if not model.tied_embeddings or len(params.held) == 1:
        return params
    copy = np.zeros(params.held.shape)
    copy[-1] = np.ceil(model.vocab_size * model.hidden_size / candidates.tp)
    return ParamCounts(
        held=params.held + copy,
        dense=params.dense + copy,
        dense_matrix=params.dense_matrix,
        expert=params.expert,
    )


def core_share(scenario: Scenario, candidates: Candidates, calibration: Calibration) -> Array:
    """Returns the factor by which ranks slow each other down where cores are fewer than ranks.

    A calibration taken with `contended_ranks` side by side already holds their contention.
    """
    node = scenario.cluster.node
    if node.gpu.kind != "cpu" or node.cores is None:
        return np.ones(len(candidates))
    ranks = np.minimum(candidates.world_size, node.gpus)
    measured = max(1.0, calibration.contended_ranks / node.cores)
    return np.asarray(np.maximum(1.0, ranks / node.cores) / measured)


def _offload(
    scenario: Scenario,
    candidates: Candidates,
    calibration: Calibration,
    saved: Array,
    fp8: Array,
    forward: Classes,
    backward: Classes,
) -> tuple[Classes, Classes]:
    """Returns the exposed copies of activations to the host and back: what compute cannot hide."""
    on = candidates.activation_offload > 0
    if not on.any():
        return {}, {}
    link = host_link(scenario)
    moved = offloaded_bytes(candidates, saved, fp8)
    copy_s = np.where(on, moved / link.bytes_per_s + link.latency_s, 0.0)
    factor = calibration.factors.get("offload", 1.0)
    return (
        {"offload": np.maximum(copy_s - np.asarray(sum(forward.values())), 0.0) * factor},
        {"offload": np.maximum(copy_s - np.asarray(sum(backward.values())), 0.0) * factor},
    )


def offloaded_bytes(candidates: Candidates, saved: Array, fp8: Array) -> Array:
    """Returns what moves to the host: everything saved, but not what is stored in FP8."""
    return np.asarray(saved + np.where(candidates.fp8_activations > 0, 0.0, fp8))


def _send_bytes(scenario: Scenario, combos: ShardCombos) -> Array:
    """Returns the bytes of one micro-batch's hidden states on a rank, by candidate."""
    width = DTYPE_BYTES[scenario.workload.precision.compute]
    tokens = combos.micro_batch_size * scenario.workload.seq_len / combos.cp
    return np.asarray((tokens * scenario.model.hidden_size * width / combos.tp)[combos.index])


def _send_seconds(
    scenario: Scenario, candidates: Candidates, calibration: Calibration, nbytes: Array
) -> tuple[Array, tuple[str, ...]]:
    """Returns the seconds of each hop between neighbouring chunks, (chunks, C)."""
    pp, vpp = int(candidates.pp[0]), int(candidates.vpp[0])
    gpus = scenario.cluster.node.domain_gpus
    ranks_per_stage = candidates.world_size // candidates.pp
    out = np.zeros((pp * vpp, len(candidates)))
    notes: dict[str, None] = {}
    if pp == 1:
        return out, ()
    for stage in range(pp):
        target = (stage + 1) % pp
        crosses = (stage * ranks_per_stage) // gpus != (target * ranks_per_stage) // gpus
        two = np.full(len(candidates), 2.0)
        group = GroupShape(size=two, local=np.where(crosses, 1.0, 2.0))
        times = collective_seconds(
            Collective.SEND_RECV, nbytes, group, scenario.cluster, calibration
        )
        notes.update(dict.fromkeys(times.assumptions))
        out[stage::pp] = times.seconds * calibration.factors.get("pp_comm", 1.0)
    out[-1] = 0.0
    return out, tuple(notes)
