"""Traffic of a chunk beside its compute: to the next stage, and to the host's memory."""

from __future__ import annotations

import numpy as np

from flopwright.ops import Array, Collective
from flopwright.plan.hops import states_into_chunks
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.collectives.times import collective_seconds
from flopwright.simulator.collectives.topology import GroupShape
from flopwright.simulator.memory.parameters import ParamCounts
from flopwright.simulator.memory.shards import zero_shards
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.combos import ShardCombos
from flopwright.simulator.training.optimizer import host_link
from flopwright.simulator.training.overlap import Classes, hidden_share
from flopwright.spec.cluster import DTYPE_BYTES, LinkSpec
from flopwright.spec.scenario import Scenario


def offload_seconds(
    scenario: Scenario,
    candidates: Candidates,
    calibration: Calibration,
    activations: Array,
    params: ParamCounts,
    compute: tuple[Array, Array],
) -> tuple[Classes, Classes]:
    """Returns the exposed copies to and from the host in a micro-batch, forward and backward.

    Forward, activations leave and the rank's shard of the weights comes; backward, both come
    and the shard of the gradients leaves. The two directions of the link do not wait for each
    other.

    Args:
        activations: bytes that a chunk moves, (chunks, C); params: by stage, (pp, C).
        compute: seconds of a chunk's forward and backward to hide behind, (chunks, C).
    """
    moves = [candidates.activation_offload, candidates.parameter_offload]
    if not any((m > 0).any() for m in (*moves, candidates.gradient_offload)):
        return {}, {}
    link, chunks = host_link(scenario), len(activations)
    weights, gradients = _shards(scenario, candidates, params, chunks)
    kept = np.where(candidates.activation_offload > 0, activations, 0.0)
    forward = np.maximum(_copy(link, kept), _copy(link, weights))
    backward = np.maximum(_copy(link, kept + weights), _copy(link, gradients))
    share = calibration.hidden_share.get("offload", 1.0)
    factor = calibration.factors.get("offload", 1.0)
    out = []
    for seconds, beside in zip((forward, backward), compute, strict=True):
        left = seconds - np.minimum(share * seconds, beside)
        out.append({"offload": left * factor})
    return out[0], out[1]


def _shards(
    scenario: Scenario, candidates: Candidates, params: ParamCounts, chunks: int
) -> tuple[Array, Array]:
    """Returns bytes of a chunk's shard of (weights, gradients) on the host, (chunks, C)."""
    precision, shards = scenario.workload.precision, zero_shards(candidates)
    pp = len(params.held)
    numbers = (params.dense / shards[0] + params.expert / shards[1]) * pp / chunks
    numbers = np.tile(numbers, (chunks // pp, 1))
    weights = numbers * DTYPE_BYTES[precision.weights] * (candidates.parameter_offload > 0)
    gradients = numbers * DTYPE_BYTES[precision.gradients] * (candidates.gradient_offload > 0)
    return weights, gradients


def _copy(link: LinkSpec, nbytes: Array) -> Array:
    return np.where(nbytes > 0, nbytes / link.bytes_per_s + link.latency_s, 0.0)


def offloaded_bytes(candidates: Candidates, saved: Array, fp8: Array) -> Array:
    """Returns what moves to the host: everything saved, but not what is stored in FP8."""
    return np.asarray(saved + np.where(candidates.fp8_activations > 0, 0.0, fp8))


def send_bytes(scenario: Scenario, combos: ShardCombos) -> Array:
    """Returns the bytes of one micro-batch's hidden state on a rank, by candidate."""
    width = DTYPE_BYTES[scenario.workload.precision.compute]
    tokens = combos.micro_batch_size * scenario.workload.seq_len / combos.cp
    cut = np.where(combos.sequence_parallel > 0, combos.tp, 1.0)
    return np.asarray((tokens * scenario.model.hidden_size * width / cut)[combos.index])


def states_sent(scenario: Scenario, candidates: Candidates) -> Array:
    """Returns how many hidden states go from chunk c to c + 1, (chunks,), 0 from the last.

    Args:
        candidates: of one pp, vpp, schedule and layout.
    """
    chunks = int(candidates.pp[0] * candidates.vpp[0])
    into: tuple[int, ...] = (1,) * chunks
    if scenario.model.attn_res_block is not None:
        into = states_into_chunks(scenario.model, candidates.plan(0))
    return np.array([*into[1:], 0], float)


def arrived_bytes(states: Array, nbytes: Array) -> Array:
    """Returns the bytes of finished sums that come into each chunk and stay, (chunks, C).

    The running sum is what its first layer keeps.

    Args:
        states: that each hop carries, (chunks,); nbytes: of one, (C,).
    """
    came = np.concatenate([[0.0], states[:-1] - 1])
    return np.asarray(came[:, None] * nbytes)


def send_seconds(
    scenario: Scenario,
    candidates: Candidates,
    calibration: Calibration,
    nbytes: Array,
    states: Array,
    stage_of: tuple[int, ...],
) -> tuple[Array, tuple[str, ...]]:
    """Returns the seconds of each hop from chunk c to c + 1, (chunks, C), and what it assumes.

    Args:
        nbytes: of a hidden state, (C,); states: how many each hop carries, (chunks,).
        stage_of: the stage of each chunk; a hop on one stage takes no time.
    """
    gpus = scenario.cluster.node.domain_gpus
    ranks = candidates.world_size // candidates.pp
    factor = calibration.factors.get("pp_comm", 1.0) * (1.0 - hidden_share(calibration, "pp_comm"))
    source, target = np.array(stage_of[:-1], int), np.array(stage_of[1:], int)
    node = np.arange(max(stage_of) + 1)[:, None] * ranks // gpus  # of each stage's first rank
    moves = (source != target)[:, None]
    crosses = moves & (node[source] != node[target])
    out = np.zeros((len(stage_of), len(candidates)))
    notes: dict[str, None] = {}
    for here, local in ((moves & ~crosses, 2.0), (crosses, 1.0)):
        if not here.any():
            continue
        group = GroupShape(size=np.array([2.0]), local=np.array([local]))
        for count in np.unique(states[:-1]):
            mine = here & (states[:-1] == count)[:, None]
            if not mine.any():
                continue
            times = collective_seconds(
                Collective.SEND_RECV, count * nbytes, group, scenario.cluster, calibration
            )
            notes.update(dict.fromkeys(times.assumptions))
            out[:-1] += np.where(mine, times.seconds * factor, 0.0)
    return out, tuple(notes)
