"""A ramp of the batch seen step by step: the run at each of its batches."""

from __future__ import annotations

from flopwright.spec.scenario import Scenario


def at_batch(scenario: Scenario, batch: int) -> Scenario:
    """Returns the scenario with another batch, without its ramp."""
    update = {"global_batch_size": batch, "batch_ramp": None}
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update=update)})
