"""A ramp of the batch seen from a plan: each of its batches, and whether a plan runs them all."""

from __future__ import annotations

from flopwright.errors import Violation
from flopwright.plan.parallel import ParallelPlan, plan_violations
from flopwright.spec.scenario import Scenario


def batch_violations(plan: ParallelPlan, scenario: Scenario) -> list[Violation]:
    """Returns what a plan breaks at any batch of the run, the full one and a ramp's."""
    return [
        violation
        for level in scenario.workload.batch_levels
        for violation in plan_violations(plan, at_batch(scenario, level.batch))
    ]


def at_batch(scenario: Scenario, batch: int) -> Scenario:
    """Returns the scenario with another batch, without its ramp."""
    update = {"global_batch_size": batch, "batch_ramp": None}
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update=update)})
