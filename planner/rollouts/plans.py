"""A candidate as a plan file."""

from __future__ import annotations

from flopwright.plan.loop import LoopPlan, PredictedLoop, make_loop_plan
from flopwright.planner.rollouts.candidate import Candidate
from flopwright.planner.rollouts.outcome import Outcome
from flopwright.spec.loop import LoopScenario


def loop_plan(
    loop: LoopScenario, made: Candidate, found: Outcome, binds: dict[str, float], seed: int
) -> LoopPlan:
    """Returns the plan of a simulated candidate.

    Args:
        binds: by how much faster it would be without each thing; empty: not looked at.
    """
    iteration = found.iteration
    predicted = PredictedLoop.model_construct(
        iteration_s=iteration.round_time_s,
        time_s=dict(iteration.time_s),
        attempts_per_s=found.attempts_per_s,
        mean_staleness=found.mean_staleness,
        gpu_hours=found.gpu_hours,
        usd=found.usd,
        bound_by=next(iter(binds), ""),
        seed=seed,
        rounds=0 if found.report is None else len(found.report.rounds),
    )
    return make_loop_plan(
        loop,
        f"{loop.name}_{made.choice.layout}",
        layout=made.choice.layout,
        staleness_bound=made.choice.staleness_bound,
        generation=made.generation_plan,
        update=made.update_plan,
        hand_over=made.hand_over,
        memory=made.memory,
        predicted=predicted,
    )
