"""What a verb prices with: `--calibration`, `--stack`, or what the scenario says."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flopwright.simulator.calibration.model import Calibration
    from flopwright.spec.scenario import Scenario


def priced_by(
    scenario: Scenario, calibration: str | None = None, stack: str | None = None
) -> Calibration:
    """Returns the calibration that the options name; without any the scenario's stack.

    Raises:
        InputError: both options, or a name that nothing has.
    """
    from flopwright.errors import InputError, Violation
    from flopwright.simulator.accuracy.named_stacks import (
        calibration_by_name,
        scenario_calibration,
    )

    if calibration is not None and stack is not None:
        rule = "a calibration has its stack"
        raise InputError(Violation(field="--stack", rule=rule, nearest_fix="leave it out"))
    if calibration is not None:
        return calibration_by_name(scenario, calibration)
    return scenario_calibration(scenario, stack)
