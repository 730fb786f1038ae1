"""A plan that was given for a scenario, held against it."""

from __future__ import annotations

from pathlib import Path

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.spec.scenario import Scenario


def check_model(path: Path, plan: PlanFile, asked: str, scenario: Scenario) -> None:
    """Refuses a plan that was made for another model: its split says nothing about this one.

    Another cluster or batch is a question worth asking, and the plan's rules are checked.

    Raises:
        InputError: the models' hashes differ.
    """
    if plan.model_hash == scenario.model.content_hash():
        return
    raise InputError(
        Violation(
            file=str(path),
            field="model_hash",
            value=plan.model_hash,
            rule=f"the plan is for {plan.scenario.model.name}, the scenario trains "
            f"{scenario.model.name}",
            nearest_fix=f"make one: flopwright plan {asked} --out plan.yaml",
        )
    )
