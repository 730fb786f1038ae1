"""Plans with the same pipeline: what each chunk of layers costs, and each stage's step end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.plan.schedules.placement import chunk_table
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.training.blocks import Blocks
from flopwright.simulator.training.candidates import CONTEXTS, RECOMPUTES, SCHEDULES, Candidates
from flopwright.simulator.training.combos import ShardCombos
from flopwright.simulator.training.layers import DENSE, MOE, chunk_kinds, representatives
from flopwright.simulator.training.overlap import Classes as Classes
from flopwright.simulator.training.overlap import exposed, host_wait_s
from flopwright.simulator.training.picker import Picker, first_layers
from flopwright.simulator.training.recompute import policy_index
from flopwright.simulator.training.step_end import StepEnd, data_traffic, step_end
from flopwright.simulator.training.transfers import (
    offload_seconds,
    offloaded_bytes,
    send_bytes,
    send_seconds,
)
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario

# Launching a layer's forward is about a third of launching its forward and backward.
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCosts:
    """C plans with one pp, vpp, schedule and layout. Chunk axes first, candidates last.

    Attributes:
        forward, backward: exposed seconds of one micro-batch by time class, (chunks, C).
        forward_s, backward_s: all classes together, (chunks, C).
        send_s: seconds of moving a micro-batch between chunk c and c + 1, (chunks, C); 0
            where both stand on one stage and for the last chunk.
        saved_bytes, saved_fp8_bytes: kept by a chunk for one micro-batch, (chunks, C).
        backward_bytes: the fullest moment of the chunk's backward beyond what it kept, what
            is made again included, (chunks, C).
        params: numbers a rank of each stage holds, (pp, C).
        flops: executed by a rank of each chunk for one micro-batch, (chunks, C).
        comm_bytes: payload by group for one micro-batch, summed over a stage, (pp, C).
        stages: chunks by (place on the stage, stage).
    """

    pp: int
    vpp: int
    candidates: Candidates
    combos: ShardCombos
    forward: Classes
    backward: Classes
    forward_s: Array
    backward_s: Array
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
    stages: NDArray[np.int64]
    pick: Picker
    core_share: Array

    @property
    def weight_s(self) -> Array:
        """Seconds of the backward that make weight gradients, (chunks, C)."""
        return self.pick.of("weight") * self.core_share

    @property
    def kernel_s(self) -> Classes:
        """Seconds of compute of one micro-batch by kernel class (kernels.py), (chunks, C).

        Forward, backward and what runs again, without the factors of time classes.
        """
        return {k: v * self.core_share for k, v in self.pick.classes("kernels").items()}


def pipeline_costs(
    scenario: Scenario,
    candidates: Candidates,
    combos: ShardCombos,
    blocks: Blocks,
    calibration: Calibration,
) -> PipelineCosts:
    """Returns the costs of candidates that share pp, vpp, schedule, layout and recompute depth.

    Args:
        combos: with the `index` of exactly these candidates.
    """
    pick = _picker(scenario, candidates, combos, blocks)
    params = _with_tied_head(scenario, candidates, pick.params())
    traffic = data_traffic(scenario, candidates, calibration, params)
    share = core_share(scenario, candidates, calibration)
    saved, fp8 = pick.of("saved_bytes"), pick.of("saved_fp8_bytes")
    micro = _Micro(scenario, candidates, calibration, pick, share)
    compute = micro.compute()
    forward = micro.side(compute[0], pick.classes("comm_forward"), traffic.forward_s)
    backward = micro.side(compute[1], pick.classes("comm_backward"), traffic.backward_s)
    copied = offloaded_bytes(candidates, saved, fp8)
    totals = (np.asarray(sum(forward.values())), np.asarray(sum(backward.values())))
    offload = offload_seconds(scenario, candidates, calibration, copied, params, totals)
    forward.update(offload[0])
    backward.update(offload[1])
    pp, vpp = int(candidates.pp[0]), int(candidates.vpp[0])
    beside = (totals[0][pick.stages[0]], totals[1][pick.stages[0]])
    muon_s = (pick.by_stage(pick.of("muon_dense_s")), pick.by_stage(pick.of("muon_expert_s")))
    end = step_end(scenario, candidates, calibration, params, traffic, beside, muon_s)
    micro.wait_for_host(forward, backward)
    nbytes = send_bytes(scenario, combos)
    send_s, notes = send_seconds(scenario, candidates, calibration, nbytes, _stage_of(pick))
    comm_bytes = {k: pick.by_stage(v) for k, v in pick.classes("comm_bytes").items()}
    return PipelineCosts(
        pp=pp,
        vpp=vpp,
        candidates=candidates,
        combos=combos,
        forward=forward,
        backward=backward,
        forward_s=np.asarray(sum(forward.values())),
        backward_s=np.asarray(sum(backward.values())),
        send_s=send_s,
        send_bytes=nbytes,
        saved_bytes=saved,
        saved_fp8_bytes=fp8,
        backward_bytes=pick.fullest_backward(_tied_bytes(scenario, candidates)),
        params=params,
        flops=pick.of("flops"),
        comm_bytes=comm_bytes,
        end=end,
        assumptions=(*blocks.assumptions, *end.assumptions, *notes),
        stages=pick.stages,
        pick=pick,
        core_share=share,
    )


def _picker(
    scenario: Scenario, candidates: Candidates, combos: ShardCombos, blocks: Blocks
) -> Picker:
    pp, vpp = int(candidates.pp[0]), int(candidates.vpp[0])
    layout = candidates.layouts[candidates.layout[0]] if candidates.layout[0] >= 0 else None
    kinds = chunk_kinds(scenario.model, pp, vpp, layout)
    depth = int(candidates.recompute_layers[0])
    whole = depth < 0 or int(candidates.recompute[0]) != RECOMPUTES.index("full")
    stages = np.array(chunk_table(SCHEDULES[candidates.schedule[0]], pp, vpp))
    return Picker(
        kinds=kinds,
        again=None if whole else first_layers(kinds, depth),
        tables=tuple(blocks.tables.values()),
        policy=policy_index(candidates),
        column=combos.index,
        stages=stages,
        round=bool((np.diff(stages.ravel()) == 1).all()),
    )


def _stage_of(pick: Picker) -> tuple[int, ...]:
    out = np.zeros(pick.stages.size, np.int64)
    for stage, chunks in enumerate(pick.stages.T):
        out[chunks] = stage
    return tuple(out.tolist())


@dataclass(frozen=True, slots=True)
class _Micro:
    """One micro-batch of every chunk on its way to exposed seconds by class."""

    scenario: Scenario
    candidates: Candidates
    calibration: Calibration
    pick: Picker
    share: Array

    def compute(self) -> tuple[Classes, Classes]:
        """Returns seconds of compute by time class, forward and backward, (chunks, C)."""
        pick, share = self.pick, self.share
        return (
            {"forward": pick.of("forward") * share},
            {
                "backward": pick.of("backward") * share,
                "recompute": pick.of("recompute") * share,
            },
        )

    def side(self, compute: Classes, comm: Classes, data_s: Array) -> Classes:
        """Returns compute and exposed communication of the forward or the backward.

        Args:
            comm: seconds of layers' collectives; data_s: of data-parallel ones, (pp, C).
        """
        vpp, _ = self.pick.stages.shape
        if data_s.any():
            by_chunk = np.empty((self.pick.stages.size, data_s.shape[1]))
            by_chunk[self.pick.stages] = data_s / vpp
            comm = comm | {"dp_micro": by_chunk}
        comm = {k: v * self.share if k != "dp_micro" else v for k, v in comm.items()}
        ring = self.candidates.context_parallel == CONTEXTS.index("ring")
        total = np.asarray(sum(compute.values()))
        left, lost = exposed(comm, total, self.calibration, {"cp_comm": ~ring})
        main = next(iter(compute))
        return {**compute, main: compute[main] + lost, **left}

    def wait_for_host(self, forward: Classes, backward: Classes) -> None:
        """Adds to both sides what they wait for the host ("host"), where a stack says so."""
        seconds = self.calibration.layer_host_s
        if not any(seconds.values()):
            return
        host_s = np.zeros((self.pick.kinds.shape[1], len(self.candidates)))
        for kind in (DENSE, MOE):
            host_s += seconds.get(kind, 0.0) * self._layers(kind)
        waits = host_wait_s(
            host_s, np.asarray(sum(forward.values())), np.asarray(sum(backward.values()))
        )
        forward["host"], backward["host"] = waits

    def _layers(self, kind: str) -> Array:
        """Returns the layers of a kind whose work the host launches; run again counts a third."""
        names = [n.startswith(kind) for n in representatives(self.scenario.model)]
        held = self.pick.kinds[names].sum(axis=0)
        again = held if self.pick.again is None else self.pick.again[names].sum(axis=0)
        full = self.candidates.recompute == RECOMPUTES.index("full")
        return np.asarray(held[:, None] + _FORWARD_SHARE * again[:, None] * full)


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
