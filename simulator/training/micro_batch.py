"""One micro-batch of plans with the same pipeline: what each chunk of layers costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flopwright.ops import Array
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.training.alike import Alike
from flopwright.simulator.training.candidates import CONTEXTS, RECOMPUTES, Candidates
from flopwright.simulator.training.layers import DENSE, MOE, representatives
from flopwright.simulator.training.overlap import Classes, exposed, host_wait_s
from flopwright.simulator.training.picker import Picker
from flopwright.simulator.training.transfers import (
    arrived_bytes,
    offload_seconds,
    offloaded_bytes,
    send_bytes,
    send_seconds,
    states_sent,
)
from flopwright.spec.cluster import DTYPE_BYTES
from flopwright.spec.scenario import Scenario

# Launching a layer's forward is about a third of launching its forward and backward.
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One micro-batch of every kind of candidates (alike.py), kinds last; see PipelineCosts.

    Attributes:
        beside_s: seconds of forward and of backward by stage, behind which data-parallel
            traffic hides at the step's end, (pp, K).
    """

    pick: Picker
    core_share: Array
    forward: Classes
    backward: Classes
    forward_s: Array
    backward_s: Array
    beside_s: tuple[Array, Array]
    send_s: Array
    send_bytes: Array
    saved_bytes: Array
    saved_fp8_bytes: Array
    backward_bytes: Array
    assumptions: tuple[str, ...]

    @property
    def weight_s(self) -> Array:
        """Seconds of the backward that make weight gradients, (chunks, K)."""
        return self.pick.of("weight") * self.core_share

    @property
    def comm_bytes(self) -> Classes:
        """Payload by group, summed over a stage, (pp, K)."""
        return {k: self.pick.by_stage(v) for k, v in self.pick.classes("comm_bytes").items()}


def micro_batch(
    scenario: Scenario,
    kinds: Alike,
    calibration: Calibration,
    pick: Picker,
    params: ParamCounts,
    data_s: tuple[Array, Array],
) -> MicroBatch:
    """Returns what one micro-batch of each kind costs.

    Args:
        pick: the tables as these kinds see them.
        params: numbers a rank of each stage holds, (pp, K).
        data_s: seconds of data-parallel traffic in forward and backward, (pp, K).
    """
    candidates = kinds.candidates
    share = core_share(scenario, candidates, calibration)
    nbytes, states = send_bytes(scenario, kinds.combos), states_sent(scenario, candidates)
    saved, fp8 = pick.of("saved_bytes"), pick.of("saved_fp8_bytes")
    saved = saved + arrived_bytes(states, nbytes)
    micro = _Micro(scenario, candidates, calibration, pick, share)
    copied = offloaded_bytes(candidates, saved, fp8)
    forward, backward, beside_s = micro.sides(copied, params, data_s)
    send_s, notes = send_seconds(
        scenario, candidates, calibration, nbytes, states, _stage_of(pick)
    )
    return MicroBatch(
        pick=pick,
        core_share=share,
        forward=forward,
        backward=backward,
        forward_s=np.asarray(sum(forward.values())),
        backward_s=np.asarray(sum(backward.values())),
        beside_s=beside_s,
        send_s=send_s,
        send_bytes=states[:, None] * nbytes,
        saved_bytes=saved,
        saved_fp8_bytes=fp8,
        backward_bytes=pick.fullest_backward(_tied_bytes(scenario, candidates)),
        assumptions=notes,
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

    def sides(
        self, copied: Array, params: ParamCounts, data_s: tuple[Array, Array]
    ) -> tuple[Classes, Classes, tuple[Array, Array]]:
        """Returns forward and backward, and what of them the step's end hides behind.

        Args:
            copied: bytes that a chunk moves to the host, (chunks, K).
        """
        compute, pick = self.compute(), self.pick
        forward = self.side(compute[0], pick.classes("comm_forward"), data_s[0])
        backward = self.side(compute[1], pick.classes("comm_backward"), data_s[1])
        totals = (np.asarray(sum(forward.values())), np.asarray(sum(backward.values())))
        offload = offload_seconds(
            self.scenario, self.candidates, self.calibration, copied, params, totals
        )
        forward.update(offload[0])
        backward.update(offload[1])
        self.wait_for_host(forward, backward)
        return forward, backward, (totals[0][pick.stages[0]], totals[1][pick.stages[0]])

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
