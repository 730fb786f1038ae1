"""The plan that a scenario's real run used, as its paper tells it, and what it took."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import Field, JsonValue, PositiveFloat

import flopwright
from flopwright.errors import InputError, Violation
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.plan_text import plan_from_fields
from flopwright.spec.base import Spec
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import read_yaml
from flopwright.units import Tokens

FOLDER: Final = Path(flopwright.__file__).parent / "scenarios" / "published_plans"


class PublishedFamily(Spec):
    """A published plan.

    Attributes:
        source: where it is published; assumed: what that does not say and is taken here.
        plan: fields of a ParallelPlan; data-parallel ranks take all GPUs that are left.
        gpu_hours: what the run took for `tokens`.
    """

    name: str = Field(min_length=1)
    source: str = Field(min_length=1)
    assumed: str = ""
    plan: dict[str, JsonValue]
    gpu_hours: PositiveFloat | None = None
    tokens: Tokens | None = None

    def plan_on(self, scenario: Scenario) -> ParallelPlan:
        """Returns the plan on the scenario's cluster."""
        return plan_from_fields(self.plan, scenario)


def published_family(scenario_name: str) -> PublishedFamily:
    """Returns the published plan of a scenario that ships.

    Raises:
        InputError: none is known.
    """
    path = FOLDER / f"{scenario_name}.yaml"
    if Path(scenario_name).name != scenario_name or not path.is_file():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.yaml")))
        raise InputError(
            Violation(
                field="--published",
                value=scenario_name,
                rule="no published plan is known of this scenario",
                nearest_fix=f"known: {known}; or give the plan by --also",
            )
        )
    return validate(PublishedFamily, read_yaml(path))


def family_gpu_hours(family: PublishedFamily, scenario: Scenario, step_time_s: float) -> float:
    """Returns the GPU-hours for the family's tokens (or the scenario's) at a step time."""
    work = scenario.workload
    steps = (family.tokens or work.total_tokens) / work.tokens_per_step
    return steps * step_time_s * family.plan_on(scenario).world_size / 3600
