"""One plan's step, simulated: by the replay of its list, or event by event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.report.attribution import busy_time, exposed_by_rank
from flopwright.report.metrics import TIME_CLASSES
from flopwright.report.trace import Trace
from flopwright.simulator.calibration.files import default_calibration
from flopwright.simulator.calibration.model import Calibration
from flopwright.simulator.engine.cluster_links import ClusterLinks
from flopwright.simulator.engine.copies import copied_apart
from flopwright.simulator.engine.memory_timeline import RankMemory, memory_timelines
from flopwright.simulator.engine.perturb import Perturbation, disturbance_of
from flopwright.simulator.engine.pipeline import StepRun, run_step
from flopwright.simulator.training.durations import Disturbance, Durations
from flopwright.simulator.training.predict import plan_costs
from flopwright.simulator.training.program import Program, program_of
from flopwright.simulator.training.replay import replay, replay_step_seconds
from flopwright.simulator.training.trace import RankTimes, replica_trace
from flopwright.spec.scenario import Scenario

EngineName = Literal["replay", "events"]
# Entries of all ranks and samples together: beyond, a step would take minutes and gigabytes.
MAX_ENTRIES = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """What a simulated step came to.

    Attributes:
        step_time_s: of the first sample, to which times, trace and memory belong.
        samples_s: step times of all samples.
        time_s: exposed seconds by time class on the busiest rank; they sum to the step.
        critical_rank: that rank; ranks: those told apart. Where replicas are alike, a rank
            is a pipeline stage.
        bubble: share of the step in which a rank waits, mean over ranks.
        num_events: that the event engine went through in the first sample; 0 of a replay.
    """

    engine: EngineName
    step_time_s: float
    samples_s: tuple[float, ...]
    time_s: dict[str, float]
    critical_rank: int
    ranks: int
    bubble: float
    memory: tuple[RankMemory, ...]
    trace: Trace
    num_events: int
    assumptions: tuple[str, ...]


def simulate(
    scenario: Scenario,
    plan: ParallelPlan,
    calibration: Calibration | None = None,
    *,
    engine: EngineName = "events",
    perturbation: Perturbation | None = None,
    samples: int = 1,
    contention: bool = True,
) -> SimulatedStep:
    """Returns one step of a plan in simulated time.

    Args:
        engine: "events" lets transfers slow each other down on the cluster's links; in the
            "replay" each has its own.
        perturbation: how ranks differ; then each replica is simulated.
        samples: steps with different jitter.
        contention: False gives the event engine's transfers their own links too.

    Raises:
        InputError: rules that the plan breaks, ranks that it does not have, too much work.
    """
    broken = plan_violations(plan, scenario)
    if broken:
        raise InputError(broken)
    calibration = calibration or default_calibration(scenario.cluster.node.gpu)
    costs, durations = copied_apart(
        scenario, plan, calibration, plan_costs(scenario, plan, calibration)
    )
    program = program_of(plan, plan.num_microbatches(scenario.workload.global_batch_size))
    disturbance = None
    if perturbation is not None and not perturbation.is_none:
        _check_size(program, plan, samples)
        disturbance = disturbance_of(perturbation, plan, program, samples)
    links = ClusterLinks(scenario.cluster, plan) if contention else None
    run = _Run(program, durations, plan, disturbance)
    times, steps, events = run.replay() if engine == "replay" else run.events(links)
    trace = tuple(
        event
        for replica, of in enumerate(times)
        for event in replica_trace(
            program, of, costs, rank_of=_rank_of(plan, replica, alike=len(times) == 1)
        )
    )
    exposed = exposed_by_rank(trace, steps[0])
    critical = max(exposed, key=lambda r: (busy_time(exposed[r]), -r))
    return SimulatedStep(
        engine=engine,
        step_time_s=steps[0],
        samples_s=tuple(steps),
        time_s={c: exposed[critical].get(c, 0.0) for c in TIME_CLASSES},
        critical_rank=critical,
        ranks=len(exposed),
        bubble=sum(e.get("idle", 0.0) for e in exposed.values()) / len(exposed) / steps[0],
        memory=memory_timelines(scenario, plan, calibration, costs, program, times[0]),
        trace=trace,
        num_events=events,
        assumptions=(
            *costs.assumptions,
            *_assumptions(plan, durations, links if engine == "events" else None),
        ),
    )


def event_step_seconds(
    scenario: Scenario, plan: ParallelPlan, calibration: Calibration
) -> tuple[float, int]:
    """Returns (the step's seconds from the event engine, entries of the plan's list).

    As `simulate` has it where ranks are alike and links are shared, without the trace.
    """
    costs = plan_costs(scenario, plan, calibration)
    _, durations = copied_apart(scenario, plan, calibration, costs)
    program = program_of(plan, plan.num_microbatches(scenario.workload.global_batch_size))
    links = ClusterLinks(scenario.cluster, plan)
    run = run_step(program, durations, replicas=plan.dp, links=links)
    return run.step_time_s, len(program.codes)


@dataclass(frozen=True, slots=True)
class _Run:
    program: Program
    durations: Durations
    plan: ParallelPlan
    disturbance: Disturbance | None

    def replay(self) -> tuple[list[RankTimes], list[float], int]:
        """Returns (times by replica of the first sample, step times of all, no events)."""
        if self.disturbance is None:
            timeline = replay(self.program, self.durations)
            times = [RankTimes(start_s=timeline.start_s, end_s=timeline.end_s)]
            return times, [float(timeline.step_time_s)], 0
        steps = replay_step_seconds(self.program, self.durations, self.disturbance)
        # The engine with private links has the same times, and tells waits inside actions apart.
        run = run_step(self.program, self.durations, disturbance=self.disturbance.only(0))
        return _by_replica(run), [float(s) for s in steps], 0

    def events(self, links: ClusterLinks | None) -> tuple[list[RankTimes], list[float], int]:
        """Returns (times by replica of the first sample, step times of all, its events)."""
        count = 1 if self.disturbance is None else self.disturbance.samples
        runs = [
            run_step(
                self.program,
                self.durations,
                replicas=self.plan.dp,
                links=links,
                disturbance=self.disturbance,
                sample=sample,
            )
            for sample in range(count)
        ]
        return _by_replica(runs[0]), [r.step_time_s for r in runs], runs[0].num_events


def _by_replica(run: StepRun) -> list[RankTimes]:
    return [
        RankTimes(
            start_s=run.start_s[r],
            end_s=run.end_s[r],
            worked_s=run.worked_s[r],
            exchange_s=run.exchange_s[r],
        )
        for r in range(run.replicas)
    ]


def _assumptions(
    plan: ParallelPlan, durations: Durations, links: ClusterLinks | None
) -> Iterator[str]:
    """Yields what a simulated step takes for granted beside its costs."""
    if durations.offload_s is not None:
        yield "copies to the host run on engines of their own: a search has them in the actions"
    if links is not None and plan.tp > 1:
        yield "tensor-parallel traffic and what is counted as hidden load no shared link"


def _rank_of(plan: ParallelPlan, replica: int, *, alike: bool) -> Callable[[int], int]:
    """Returns stage -> rank: of the first GPU, or the stage where replicas are alike."""
    if alike:
        return int
    return lambda stage: (stage * plan.dp + replica) * plan.cp * plan.tp


def _check_size(program: Program, plan: ParallelPlan, samples: int) -> None:
    entries = len(program.codes) * plan.dp * samples
    if entries > MAX_ENTRIES:
        each = max(1, MAX_ENTRIES // (len(program.codes) * plan.dp))
        raise InputError(
            Violation(
                field="samples",
                value=str(samples),
                rule=f"{entries:,} actions of {plan.dp} replicas are too many to simulate",
                limit=f"{MAX_ENTRIES:,} actions",
                nearest_fix=f"use {each} samples" if each < samples else "use fewer replicas",
            )
        )


def spread(samples_s: tuple[float, ...]) -> dict[str, float]:
    """Returns the median, 10th and 90th percentile of step times."""
    low, middle, high = np.quantile(samples_s, (0.1, 0.5, 0.9))
    return {"p10": float(low), "median": float(middle), "p90": float(high)}
