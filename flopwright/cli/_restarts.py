"""How `flopwright run` goes on when a run fails: options, and where smaller plans come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwright.executor.launch.supervisor import Fallbacks, Supervision
    from flopwright.plan.file import PlanFile
    from flopwright.simulator.calibration.model import Calibration

MaxRestarts = Annotated[
    int,
    typer.Option("--max-restarts", min=0, help="Starts after failures, without a new checkpoint."),
]
Fallback = Annotated[
    list[Path] | None,
    typer.Option("--fallback", help="Plan for fewer ranks, if some are lost; once each."),
]
MaxRollbacks = Annotated[
    int,
    typer.Option("--max-rollbacks", min=0, help="Times to go back to before a loss spike."),
]


def supervision(
    plans: Sequence[Path], max_restarts: int, fallback: Sequence[Path] | None, *, phases: bool
) -> Supervision:
    """Returns what starts a run again that failed.

    Without fallbacks given they are planned when ranks are lost, as `flopwright export` does.

    Raises:
        InputError: a fallback is for something else than the plan.
    """
    from flopwright.errors import InputError, Violation
    from flopwright.executor.launch.supervisor import (
        Supervision,
        given_fallbacks,
        no_fallbacks,
    )
    from flopwright.spec.load import load_plan

    asked: Fallbacks = planned_fallbacks if max_restarts else no_fallbacks
    if fallback:
        if phases or len(plans) > 1:
            rule = "goes with one plan; those of a run's phases are planned when they are needed"
            raise InputError(Violation(field="--fallback", rule=rule))
        asked = given_fallbacks(fallback, load_plan(plans[0]))
    return Supervision(
        max_restarts=max_restarts, fallbacks=asked, step_time_s=predicted_step_time_s
    )


def planned_fallbacks(plan: PlanFile) -> tuple[PlanFile, ...]:
    """Returns plans for fewer ranks with the plan's batch, the largest first."""
    from flopwright.planner.fallback import fallbacks

    found = fallbacks(plan, predicted_step_time_s(plan), _calibration(plan))
    return tuple(f.plan for f in found)


def predicted_step_time_s(plan: PlanFile) -> float:
    """Returns a plan's step time, seconds: the file's, or predicted now."""
    from flopwright.simulator.training.predict import predict

    if plan.predicted is not None:
        return plan.predicted.step_time_s
    prediction, _ = predict(plan.scenario, plan.parallel, _calibration(plan), name=plan.name)
    return prediction.metrics.step_time_s


def _calibration(plan: PlanFile) -> Calibration:
    from flopwright.cli._priced_by import priced_by

    named = plan.predicted.calibration_id if plan.predicted is not None else None
    return priced_by(plan.scenario, named, None)
