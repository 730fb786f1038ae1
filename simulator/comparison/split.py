"""How much of a step's error is what actions cost, and how much how they fit together.

The simulator's list is replayed with what the run's parts took. What the replay differs by
from the prediction is the cost error; what it differs by from the measured step is the
structure error: waiting, overlap and time between actions that the list does not have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flopwright.ops import Array
from flopwright.plan.parallel import ParallelPlan
from flopwright.plan.schedules.placement import stage_of_chunk
from flopwright.report.findings import ErrorSplit
from flopwright.report.metrics import Measurement, Prediction, RankMetrics
from flopwright.report.trace import TraceEvent
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.comparison.parts import COMPUTE, Parts, predicted_parts
from flopwright.simulator.training.durations import Disturbance, Durations
from flopwright.simulator.training.measured import replayed_step_seconds
from flopwright.simulator.training.predict import plan_costs
from flopwright.simulator.training.program import Op, Program, program_of
from flopwright.simulator.training.replay import replay_step_seconds
from flopwright.simulator.training.stages import Classes, PipelineCosts
from flopwright.spec.scenario import Scenario

_EXCHANGE = "ep_comm"


def split_error(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    prediction: Prediction,
    measurement: Measurement,
    trace: Sequence[TraceEvent] = (),
) -> ErrorSplit:
    """Returns the two parts of the step time's signed error.

    Args:
        trace: all ranks' actions of one step, if they were kept: then each action takes what
            it took there, scaled to the measured step. Else actions take what their time
            classes did, by rank where ranks were told apart.
    """
    program = program_of(plan, plan.num_microbatches(scenario.workload.global_batch_size))
    measured = measurement.metrics.step_time_s
    replayed = _of_actions(program, plan, trace, measured) if trace else None
    if replayed is not None:
        basis = "actions"
    else:
        basis = "ranks" if any(r.time_s for r in measurement.ranks) else "classes"
        replayed = _of_classes(scenario, plan, calibration, prediction, measurement, program)
    predicted = prediction.metrics.step_time_s
    return ErrorSplit(
        replayed_s=replayed,
        cost=(predicted - replayed) / measured,
        structure=(replayed - measured) / measured,
        basis=basis,
    )


def _of_actions(
    program: Program, plan: ParallelPlan, trace: Sequence[TraceEvent], measured_s: float
) -> float | None:
    """Returns the replay of a step's own actions; None where the trace has not all of them."""
    gpus = plan.cp * plan.tp
    ranks: dict[int, dict[str, tuple[float, float]]] = {}
    for event in trace:
        mine = ranks.setdefault(event.rank, {})
        for name in (event.name, ""):
            begin, end = mine.get(name, (event.start_s, event.end_s))
            mine[name] = (min(begin, event.start_s), max(end, event.end_s))
    firsts = [[(s * plan.dp + r) * gpus for r in range(plan.dp)] for s in range(plan.pp)]
    needed = [
        {str(a) for c, a in zip(program.codes, program.actions, strict=True) if c.stage == s}
        for s in range(plan.pp)
    ]
    for stage, members in enumerate(firsts):
        if any(rank not in ranks or not needed[stage] <= set(ranks[rank]) for rank in members):
            return None
    step = [[ranks[rank] for rank in members] for members in firsts]
    length = max(ranks[r][""][1] for m in firsts for r in m) - min(
        ranks[r][""][0] for m in firsts for r in m
    )
    return float(replayed_step_seconds(program, [step])[0]) * measured_s / length


def _of_classes(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration,
    prediction: Prediction,
    measurement: Measurement,
    program: Program,
) -> float:
    costs = plan_costs(scenario, plan, calibration)
    parts = predicted_parts(scenario, plan, calibration)
    ratios = _Ratios.of(plan, parts, prediction, measurement)
    durations = _scaled(costs, plan, ratios)
    disturbance = Disturbance(
        factors=tuple(
            _factors(program, stage, ratios.ranks[stage]) for stage in range(program.num_stages)
        ),
        links=np.ones((plan.pp, plan.dp)),
    )
    return float(replay_step_seconds(program, durations, disturbance)[0])


def _factors(program: Program, stage: int, ranks: Array) -> Array:
    """Returns each replica's compute beside its stage's mean, (places, 1, replicas)."""
    ops = np.array([c.op for c in program.codes if c.stage == stage])
    works = np.isin(ops, (Op.COMPUTE, Op.FIRST, Op.SECOND, Op.STEP))
    return np.where(works[:, None, None], ranks[None, None, :], 1.0)


@dataclass(frozen=True, slots=True)
class _Ratios:
    """Measured over predicted seconds.

    Attributes:
        classes: by stage and time class; messages: by (sender, receiver) stage.
        ranks: of a stage's replicas, compute over the stage's mean, (stages, replicas).
    """

    classes: tuple[Mapping[str, float], ...]
    messages: Mapping[tuple[int, int], float]
    ranks: Array

    @classmethod
    def of(
        cls, plan: ParallelPlan, parts: Parts, prediction: Prediction, measurement: Measurement
    ) -> _Ratios:
        """Returns those of a run; where ranks were not told apart, all are as the critical one."""
        if not any(r.time_s for r in measurement.ranks):
            seen, foreseen = measurement.metrics.time_s, prediction.metrics.time_s
            same = {c: s / foreseen[c] for c, s in seen.items() if foreseen.get(c, 0.0) > 0}
            messages = dict.fromkeys(parts.messages_s, same.get("pp_comm", 1.0))
            return cls((same,) * plan.pp, messages, np.ones((plan.pp, plan.dp)))
        stages = [[r for r in measurement.ranks if r.stage == s] for s in range(plan.pp)]
        timed = {c for r in measurement.ranks for c in r.time_s}
        classes = tuple(
            {c: _mean(ranks, c) / p for c, p in parts.time_s[s].items() if c in timed}
            if ranks
            else {}
            for s, ranks in enumerate(stages)
        )
        return cls(classes, _message_ratios(plan, parts, measurement), _rank_ratios(plan, stages))

    def apply(self, stage: int, classes: Classes, chunk: int) -> dict[str, float]:
        """Returns a chunk's seconds by class as they were measured."""
        known = self.classes[stage]
        return {c: float(v[chunk, 0]) * known.get(c, 1.0) for c, v in classes.items()}


def _mean(ranks: Sequence[RankMetrics], name: str) -> float:
    return sum(r.time_s.get(name, 0.0) for r in ranks) / len(ranks)


def _message_ratios(
    plan: ParallelPlan, parts: Parts, measurement: Measurement
) -> dict[tuple[int, int], float]:
    """Returns the slowest replica's messages over the predicted ones."""
    size = plan.dp * plan.cp * plan.tp
    out: dict[tuple[int, int], float] = {}
    for link in measurement.links:
        way = (link.ranks[0] // size, link.ranks[-1] // size)
        if link.cls == "pp_comm" and parts.messages_s.get(way):
            out[way] = max(out.get(way, 0.0), link.seconds / parts.messages_s[way])
    return out


def _rank_ratios(plan: ParallelPlan, stages: Sequence[Sequence[RankMetrics]]) -> Array:
    out = np.ones((plan.pp, plan.dp))
    gpus = plan.cp * plan.tp
    for stage, ranks in enumerate(stages):
        seconds = {r.rank: sum(v for c, v in r.time_s.items() if c in COMPUTE) for r in ranks}
        mean = sum(seconds.values()) / max(len(seconds), 1)
        for replica in range(plan.dp):
            first = (stage * plan.dp + replica) * gpus
            mine = [seconds[r] for r in range(first, first + gpus) if r in seconds]
            if mine and mean > 0:
                out[stage, replica] = max(mine) / mean
    return out


def _scaled(costs: PipelineCosts, plan: ParallelPlan, ratios: _Ratios) -> Durations:
    """Returns the plan's durations with every class at its measured ratio."""
    chunks = range(len(costs.send_s))
    stage = [stage_of_chunk(plan, c) for c in chunks]
    forward = [ratios.apply(stage[c], costs.forward, c) for c in chunks]
    backward = [ratios.apply(stage[c], costs.backward, c) for c in chunks]
    # A weight gradient is a share of the backward's own compute.
    weights = [
        float(costs.weight_s[c, 0]) * ratios.classes[stage[c]].get("backward", 1.0) for c in chunks
    ]
    sends = [
        float(costs.send_s[c, 0])
        * ratios.messages.get((stage[c], stage[min(c + 1, len(chunks) - 1)]), 1.0)
        for c in chunks
    ]
    end = costs.end
    stages = range(plan.pp)
    dp = [ratios.classes[s].get("dp_comm", 1.0) for s in stages]
    gathers = np.array([float(end.gather_s[s, 0]) * dp[s] for s in stages])
    tails = np.array(
        [
            float(end.update_s[s, 0]) * ratios.classes[s].get("optimizer", 1.0)
            + float(end.offload_s[s, 0]) * ratios.classes[s].get("offload", 1.0)
            + float(np.asarray(end.host_s)) * ratios.classes[s].get("host", 1.0)
            for s in stages
        ]
    )
    return Durations(
        forward_s=np.array([sum(p.values()) for p in forward]),
        backward_s=np.array([sum(p.values()) for p in backward]),
        send_s=np.array(sends),
        reduce_s=np.array([float(end.reduce_s[s, 0]) * dp[s] for s in stages]),
        step_s=gathers + tails,
        norm_s=float(end.norm_s[0]),
        weight_s=np.array(weights),
        recompute_s=np.array([p.get("recompute", 0.0) for p in backward]),
        forward_exchange_s=np.array([p.get(_EXCHANGE, 0.0) for p in forward]),
        backward_exchange_s=np.array([p.get(_EXCHANGE, 0.0) for p in backward]),
        forward_comm_s=np.array([_comm(p) for p in forward]),
        backward_comm_s=np.array([_comm(p) for p in backward]),
        step_comm_s=gathers,
    )


def _comm(parts: Mapping[str, float]) -> float:
    return sum(v for c, v in parts.items() if c not in COMPUTE and c != _EXCHANGE)
