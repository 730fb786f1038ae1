"""One plan, exactly: its lowered list replayed in simulated time."""

from __future__ import annotations

import numpy as np

from flopwright.errors import InputError
from flopwright.ops import Array
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.report.attribution import exposed_time
from flopwright.report.metrics import TIME_CLASSES, Prediction, Provenance, StepMetrics
from flopwright.report.trace import Trace
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.interval import step_time_interval
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.operators.domain import extrapolations
from flopwright.simulator.training.assumptions import standing_assumptions
from flopwright.simulator.training.blocks import price_blocks, shard_combos
from flopwright.simulator.training.candidates import Candidates
from flopwright.simulator.training.durations import Durations
from flopwright.simulator.training.evaluate import memory_of
from flopwright.simulator.training.metrics import flops_by_convention, step_metrics
from flopwright.simulator.training.program import Program, program_of
from flopwright.simulator.training.replay import Timeline, replay
from flopwright.simulator.training.shared_cores import replay_shared, shared_cores
from flopwright.simulator.training.stages import Classes, PipelineCosts, pipeline_costs
from flopwright.simulator.training.trace import COMPUTE_CLASSES, step_trace
from flopwright.spec.scenario import Scenario


def predict(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration | None = None,
    name: str = "plan",
    *,
    whole_trace: bool = True,
) -> tuple[Prediction, Trace]:
    """Returns the prediction for one plan and the trace of its step, a rank a stage.

    Args:
        calibration: None takes the public prior of the scenario's GPU.
        whole_trace: False leaves the trace at the stage that works longest: much faster,
            and the prediction is the same.

    Raises:
        InputError: every rule of shape that the plan breaks.
    """
    broken = plan_violations(plan, scenario)
    if broken:
        raise InputError(broken)
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    costs = plan_costs(scenario, plan, calibration)
    m = plan.num_microbatches(scenario.workload.global_batch_size)
    program = program_of(plan, m)
    shared = shared_cores(scenario, plan)
    durations = durations_of(costs)
    timeline = (
        replay(program, durations) if shared is None else replay_shared(program, durations, shared)
    )
    critical = _critical_stage(program, timeline, plan.pp)
    only = None if whole_trace else critical
    trace = step_trace(program, timeline, costs, only_stage=only)
    step_s = float(timeline.step_time_s)
    exposed = exposed_time(trace, critical, step_s)
    time_s = {c: exposed.get(c, 0.0) for c in TIME_CLASSES}
    prediction = Prediction(
        plan_name=name,
        metrics=_metrics(scenario, plan, costs, calibration, step_s, time_s),
        step_time_interval=step_time_interval(
            calibration, time_s, extrapolated=extrapolations(costs.assumptions) > 0
        ),
        provenance=_provenance(calibration, costs.assumptions),
        calibration_id=calibration.id,
        flops_per_s_per_gpu=flops_by_convention(scenario, plan.world_size, step_s),
        assumptions=(*standing_assumptions(scenario, plan, calibration), *costs.assumptions),
    )
    return prediction, trace


def _metrics(
    scenario: Scenario,
    plan: ParallelPlan,
    costs: PipelineCosts,
    calibration: Calibration,
    step_s: float,
    time_s: dict[str, float],
) -> StepMetrics:
    memory = memory_of(scenario, costs, calibration)
    m = plan.num_microbatches(scenario.workload.global_batch_size)
    ranks_per_stage = plan.dp * plan.cp * plan.tp
    return step_metrics(
        scenario,
        plan.world_size,
        step_s,
        time_s=time_s,
        memory_bytes=[
            {c: int(values[s, 0]) for c, values in memory.classes.items()} for s in range(plan.pp)
        ],
        executed_flops=float(costs.flops.sum()) * m * ranks_per_stage,
    )


def plan_costs(scenario: Scenario, plan: ParallelPlan, calibration: Calibration) -> PipelineCosts:
    """Returns one plan's costs by chunk and stage, the candidate axis of length 1."""
    candidates = Candidates.from_plans([plan])
    combos = shard_combos(candidates)
    blocks = price_blocks(scenario, combos, calibration)
    return pipeline_costs(scenario, candidates, combos, blocks, calibration)


def durations_of(costs: PipelineCosts, column: int = 0) -> Durations:
    """Returns what the replay of candidate `column` needs."""

    def take(values: Array) -> Array:
        return np.asarray(values[:, column])

    end = costs.end
    return Durations(
        forward_s=take(costs.forward_s),
        backward_s=take(costs.backward_s),
        send_s=take(costs.send_s),
        reduce_s=take(end.reduce_s),
        step_s=take(end.tail_s),
        norm_s=float(end.norm_s[column]),
        weight_s=take(costs.weight_s),
        recompute_s=_part(costs.backward, "recompute", column),
        forward_exchange_s=_part(costs.forward, "ep_comm", column),
        backward_exchange_s=_part(costs.backward, "ep_comm", column),
        forward_comm_s=_comm(costs.forward, column),
        backward_comm_s=_comm(costs.backward, column),
        step_comm_s=take(end.gather_s),
    )


def _part(classes: Classes, name: str, column: int) -> Array | None:
    return classes[name][:, column] if name in classes else None


def _comm(classes: Classes, column: int) -> Array | None:
    """Returns the seconds in which nothing is computed, exchanges with other replicas apart."""
    rest = [v[:, column] for k, v in classes.items() if k not in COMPUTE_CLASSES | {"ep_comm"}]
    return np.sum(rest, axis=0) if rest else None


def _critical_stage(program: Program, timeline: Timeline, pp: int) -> int:
    """Returns the stage that works longest: what it waits for is the pipeline's idle time."""
    stage = np.array([c.stage for c in program.codes])
    own = np.array([a.peer < 0 for a in program.actions])
    seconds = (timeline.end_s - timeline.start_s)[own]
    return int(np.bincount(stage[own], weights=seconds, minlength=pp).argmax())


def _provenance(calibration: Calibration, assumptions: tuple[str, ...]) -> Provenance:
    """Returns "extrapolated" where a calibration was used outside what it measured."""
    if not calibration.stack_id:
        return "analytic"
    return "extrapolated" if assumptions else "calibrated"
