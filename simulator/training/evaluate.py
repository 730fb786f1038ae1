"""What many plans would take: time, memory and traffic, in one pass without a loop over plans.

Step times are closed forms (closed_form.py): where a plan is singled out, predict.py
replays its lowered list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from flopwright.ops import Array
from flopwright.report.metrics import MEMORY_CLASSES, TIME_CLASSES
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.memory.stages import (
    SavedByChunk,
    StageMemory,
    StagePeaks,
    stage_memory,
    stage_peaks,
)
from flopwright.simulator.training.blocks import Blocks, price_blocks
from flopwright.simulator.training.candidates import (
    RECOMPUTES,
    SCHEDULES,
    Candidates,
    Ints,
    distinct,
)
from flopwright.simulator.training.check import check_candidates
from flopwright.simulator.training.closed_form import stage_end_seconds
from flopwright.simulator.training.combos import ShardCombos, shard_combos
from flopwright.simulator.training.durations import pair_seconds
from flopwright.simulator.training.schedule_rules import reduces_by_chunk
from flopwright.simulator.training.shared_cores import shared_bound
from flopwright.simulator.training.stages import PipelineCosts, pipeline_costs
from flopwright.spec.scenario import Scenario

# Schedules that run a forward and a backward as a pair.
_PAIRED: Final = frozenset({"dualpipe_v", "interleaved_1f1b_overlap"})
# Schedules that make weight gradients with the others, and so need no time for them apart.
_WHOLE_BACKWARD: Final = frozenset({"gpipe", "1f1b", "interleaved_1f1b"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Results by candidate.

    Attributes:
        step_time_s: (C,) closed form of one optimizer step; it never exceeds the replay.
        time_s: (C,) exposed seconds by time class on the busiest stage; they sum to the step.
        memory_bytes: (stages, C) by memory class; stages past a plan's pp hold 0.
        peak_bytes: (C,) all classes of the fullest stage together.
        host_bytes: (C,) host memory that one node needs.
        comm_bytes: (C,) payload a rank of the busiest stage sends in a step, by group.
        fits: (C,) whether peak_bytes leave search.memory_headroom of the processor's memory
            free, and host_bytes fit the node.
    """

    step_time_s: Array
    time_s: dict[str, Array]
    memory_bytes: dict[str, Array]
    peak_bytes: Array
    host_bytes: Array
    comm_bytes: dict[str, Array]
    fits: NDArray[np.bool_]
    assumptions: tuple[str, ...]


def evaluate(
    scenario: Scenario, candidates: Candidates, calibration: Calibration | None = None
) -> Evaluation:
    """Returns time, memory and traffic of every candidate.

    Args:
        calibration: None takes the public prior of the scenario's GPU.

    Raises:
        InputError: candidates that the batch, the model or the cluster rules out.
    """
    check_candidates(scenario, candidates)
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    combos = shard_combos(candidates)
    blocks = price_blocks(scenario, combos, calibration)
    out = _Results.empty(len(candidates), int(candidates.pp.max(initial=1)))
    notes: dict[str, None] = {}
    for index in same_pipeline(candidates):
        costs = group_costs(scenario, candidates, combos, blocks, calibration, index)
        notes.update(dict.fromkeys(costs.assumptions))
        out.put(index, scenario, costs, calibration)
    return out.finish(scenario, tuple(notes))


def same_pipeline(candidates: Candidates) -> Iterator[Ints]:
    """Yields the indices of candidates with one pp, vpp, schedule, layout and recompute depth."""
    c = candidates
    if not len(c):
        return
    _, group = distinct(c.pp, c.vpp, c.schedule, c.layout, c.recompute_layers, _whole(c))
    order = np.argsort(group, kind="stable")
    edges = np.flatnonzero(np.diff(group[order])) + 1
    yield from np.split(order, edges)


def _whole(c: Candidates) -> Ints:
    """Returns 1 where a recompute depth is given and holds: only the full policy has one."""
    whole = (c.recompute_layers >= 0) & (c.recompute == RECOMPUTES.index("full"))
    return np.asarray(whole, np.int64)


def group_costs(
    scenario: Scenario,
    candidates: Candidates,
    combos: ShardCombos,
    blocks: Blocks,
    calibration: Calibration,
    index: Ints,
) -> PipelineCosts:
    """Returns the costs of the candidates at `index`, which share one pipeline."""
    mine = replace(combos, index=combos.index[index])
    return pipeline_costs(scenario, candidates.take(index), mine, blocks, calibration)


def memory_of(scenario: Scenario, costs: PipelineCosts, calibration: Calibration) -> StageMemory:
    """Returns the memory of plans with one pipeline, the calibration's factors applied."""
    factors = calibration.memory_factors
    return stage_memory(scenario, costs.ranks, costs.params, costs.kinds, _saved(costs), factors)


def peaks_of(scenario: Scenario, costs: PipelineCosts, calibration: Calibration) -> StagePeaks:
    """Returns the fullest stage of plans with one pipeline: what `memory_of` sums up to."""
    factors = calibration.memory_factors
    return stage_peaks(scenario, costs.ranks, costs.params, costs.kinds, _saved(costs), factors)


def _saved(costs: PipelineCosts) -> SavedByChunk:
    micro = costs.micro
    return SavedByChunk(
        schedule=SCHEDULES[int(costs.candidates.schedule[0])],
        places=costs.stages,
        other=micro.saved_bytes,
        fp8=micro.saved_fp8_bytes,
        backward=micro.backward_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Results:
    """Arrays that groups of candidates are written into."""

    step_time_s: Array
    time_s: dict[str, Array]
    memory_bytes: dict[str, Array]
    host_bytes: Array
    comm_bytes: dict[str, Array]

    @classmethod
    def empty(cls, count: int, stages: int) -> _Results:
        return cls(
            np.zeros(count),
            {k: np.zeros(count) for k in TIME_CLASSES},
            {k: np.zeros((stages, count)) for k in MEMORY_CLASSES},
            np.zeros(count),
            {k: np.zeros(count) for k in ("tp", "cp", "ep", "etp", "pp", "dp")},
        )

    def put(
        self, index: Ints, scenario: Scenario, costs: PipelineCosts, calibration: Calibration
    ) -> None:
        m = costs.candidates.num_microbatches(scenario.workload.global_batch_size)
        step, times, stage = step_times(costs, m)
        step, times = shared_bound(scenario, costs, m, step, times)
        self.step_time_s[index] = step
        for name, seconds in times.items():
            self.time_s[name][index] = seconds
        memory = memory_of(scenario, costs, calibration)
        for name, values in memory.classes.items():
            self.memory_bytes[name][: costs.pp, index] = values
        self.host_bytes[index] = memory.host_bytes.max(axis=0) * scenario.cluster.node.gpus
        column = np.arange(len(index))
        for name, values in costs.micro.comm_bytes.items():
            self.comm_bytes[name][index] = values[stage, costs.kinds.of] * m
        if costs.pp > 1:
            hop = costs.send_bytes[:-1].mean(axis=0)  # both ways over a hop of each chunk
            self.comm_bytes["pp"][index] = 2 * hop * m * costs.vpp
        self.comm_bytes["dp"][index] = costs.end.comm_bytes[stage, column]

    def finish(self, scenario: Scenario, assumptions: tuple[str, ...]) -> Evaluation:
        peak = np.asarray(sum(self.memory_bytes.values())).max(axis=0, initial=0.0)
        node = scenario.cluster.node
        usable = node.gpu.hbm_bytes * (1 - scenario.search.memory_headroom)
        return Evaluation(
            step_time_s=self.step_time_s,
            time_s=self.time_s,
            memory_bytes=self.memory_bytes,
            peak_bytes=peak,
            host_bytes=self.host_bytes,
            comm_bytes=self.comm_bytes,
            fits=(peak <= usable) & (self.host_bytes <= node.host_bytes),
            assumptions=assumptions,
        )


def step_times(costs: PipelineCosts, m: Ints) -> tuple[Array, dict[str, Array], Ints]:
    """Returns (step seconds, seconds by time class, the busiest stage) of each candidate.

    The step is a lower bound of the replay, and equal to it for equal stages and free hops;
    what it exceeds the busiest stage's work by is pp_comm, as far as hops make it longer,
    and idle.
    """
    end, micro, kind, column = costs.end, costs.micro, costs.kinds.of, np.arange(len(m))
    tail_s = end.tail_s
    work = m[costs.kinds.first] * costs.pick.by_stage(micro.forward_s + micro.backward_s)
    stage = (work[:, kind] + end.reduce_s + tail_s).argmax(axis=0)
    once = {"dp_comm": end.reduce_s + end.gather_s, "optimizer": end.update_s}
    once["offload"] = end.offload_s
    times = {name: seconds[stage, column] for name, seconds in once.items()}
    times["host"] = np.full(len(m), end.host_s)
    chunks = costs.stages[:, stage]  # those of each candidate's busiest stage, (vpp, C)
    for classes in (micro.forward, micro.backward):
        for name, seconds in classes.items():
            total = m * seconds[chunks, kind].sum(axis=0)
            times[name] = times[name] + total if name in times else total
    times["dp_comm"] = times["dp_comm"] + end.norm_s
    step, free = _step_seconds(costs, m[costs.kinds.first], tail_s)
    left = np.maximum(step - np.asarray(sum(times.values())), 0.0)
    times["pp_comm"] = np.minimum(np.maximum(step - free, 0.0), left)
    times["idle"] = left - times["pp_comm"]
    return step, times, stage


def step_bound_s(costs: PipelineCosts, m: Ints) -> Array:
    """Returns the seconds of a step at least, (C,): `step_times` without its classes."""
    done = _backward_ends(costs, m[costs.kinds.first], free=False)[0]
    return _step_after(costs, done, costs.end.tail_s.max(axis=0))


def _step_seconds(costs: PipelineCosts, m: Ints, tail_s: Array) -> tuple[Array, Array]:
    """Returns the step's seconds with hops as they are, and if they took no time.

    Args:
        m: micro-batches of each kind of them; tail_s: what follows the norm, by stage.
    """
    tail = tail_s.max(axis=0)
    out = [_step_after(costs, done, tail) for done in _backward_ends(costs, m)]
    return out[0], out[-1]


def _step_after(costs: PipelineCosts, done: Array, tail: Array) -> Array:
    """Returns when a step ends whose stages have done their backwards, (pp, K), by then."""
    end = costs.end
    # Of chunks that reduce by themselves at least the last one does so after the backward.
    reduced = end.reduce_s / np.where(reduces_by_chunk(costs.candidates), costs.vpp, 1)
    ready = (costs.kinds.spread(done) + reduced).max(axis=0) + end.norm_s
    return np.asarray(ready + tail)


def _backward_ends(costs: PipelineCosts, m: Ints, *, free: bool = True) -> list[Array]:
    """Returns when each stage's last backward ends, (pp, K): with hops and, of a pipeline,
    without them where `free`. Both are one call, the columns side by side.
    """
    micro, schedule = costs.micro, int(costs.candidates.schedule[0])
    times = 2 if costs.pp > 1 and free else 1

    def repeated(values: Array) -> Array:
        return np.concatenate([values] * times, axis=-1) if times > 1 else values

    hop_s = repeated(micro.send_s)
    if times > 1:
        hop_s[:, len(m) :] = 0.0
    whole = SCHEDULES[schedule] in _WHOLE_BACKWARD
    saving = _pair_saving_s(costs)
    ends = stage_end_seconds(
        schedule,
        repeated(micro.forward_s),
        repeated(micro.backward_s),
        hop_s,
        np.concatenate([m] * times),
        costs.pp,
        weight_s=None if whole else repeated(micro.weight_s),
        pair_saving_s=None if saving is None else repeated(saving),
    )
    return np.split(ends, times, axis=1)


def _pair_saving_s(costs: PipelineCosts) -> Array | None:
    """Returns by how much a forward and a backward run as a pair are shorter.

    By stage and local chunk of the forward and of the backward, (pp, vpp, vpp, K).

    Only the exchanges of experts hide behind the other's work.
    """
    if SCHEDULES[int(costs.candidates.schedule[0])] not in _PAIRED:
        return None
    micro = costs.micro
    f, b = micro.forward_s, micro.backward_s
    zero = np.zeros_like(f)
    out, in_ = micro.forward.get("ep_comm", zero), micro.backward.get("ep_comm", zero)
    forward, backward = (costs.stages.T[:, :, None], costs.stages.T[:, None, :])
    f, b, out, in_ = f[forward], b[backward], out[forward], in_[backward]
    return np.asarray(f + b - pair_seconds(f - out, out, b - in_, in_))
