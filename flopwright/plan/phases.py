"""A run's phases as scenarios of their own, and the plan of the whole run.

Each phase is an ordinary scenario: what plans, prices or trains one step knows nothing of
phases. Its model is the run's with that phase's scaling of positions; the weights go on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from flopwright.errors import InputError, Violation, did_you_mean
from flopwright.plan.file import PlanFile, PredictedStep
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.base import Spec
from flopwright.spec.load import make_plan_file
from flopwright.spec.model import ModelSpec
from flopwright.spec.scenario import Scenario
from flopwright.spec.validate import validate
from flopwright.spec.workload import FIRST_PHASE, Workload
from flopwright.spec.yaml_lines import read_yaml

RUN_SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One phase: its name and its scenario, which has no later phases."""

    name: str
    scenario: Scenario


class PhasePlan(Spec):
    """The split of one phase, and what was predicted of its step."""

    name: str
    parallel: ParallelPlan
    predicted: PredictedStep | None = None


class RunPlan(Spec):
    """The plan of a whole run: one split a phase, in order.

    Attributes:
        scenario: the run's, with all its phases; `phases_of` makes each phase's.
        phases: one for each phase of the scenario, by the same names.
    """

    schema_version: Literal[1] = RUN_SCHEMA_VERSION
    tool_version: str
    scenario_hash: str
    scenario: Scenario
    phases: tuple[PhasePlan, ...] = Field(min_length=1)


def load_run_plan(path: str | Path) -> RunPlan:
    """Returns the plan of a whole run, held against its own contents.

    Raises:
        InputError: unreadable or invalid file, a hash that does not match, or other phases
            than the scenario has.
    """
    document = read_yaml(Path(path))
    plan = validate(RunPlan, document)
    found, actual = [], plan.scenario.content_hash()
    if plan.scenario_hash != actual:
        found.append(
            Violation(
                field="scenario_hash",
                value=plan.scenario_hash,
                rule="does not match the contents of the file",
                nearest_fix=f"the contents hash to {actual}; make the plan again",
                file=str(path),
                line=document.line_of(("scenario_hash",)),
            )
        )
    names = [phase.name for phase in phases_of(plan.scenario)]
    if [phase.name for phase in plan.phases] != names:
        found.append(
            Violation(
                field="phases",
                rule=f"must be the scenario's, in order: {', '.join(names)}",
                file=str(path),
                line=document.line_of(("phases",)),
            )
        )
    if found:
        raise InputError(found)
    return plan


def plan_of_phase(run: RunPlan, name: str) -> PlanFile:
    """Returns the plan file of one phase, as if it had been planned alone.

    Raises:
        InputError: there is no such phase.
    """
    scenario = phase_of(run.scenario, name).scenario
    chosen = next(phase for phase in run.phases if phase.name == name)
    label = chosen.parallel.label()
    return make_plan_file(scenario, chosen.parallel, label, chosen.predicted)


def phases_of(scenario: Scenario) -> tuple[Phase, ...]:
    """Returns the phases in order; a scenario without later ones is its own first phase.

    Raises:
        InputError: a phase scales positions that the model does not have.
    """
    first = scenario.workload
    workloads = [(FIRST_PHASE, first.alone())]
    workloads += [(phase.name, first.of_phase(phase)) for phase in first.later_phases]
    return tuple(
        Phase(name=name, scenario=_alone(scenario, name, workload)) for name, workload in workloads
    )


def phase_of(scenario: Scenario, name: str) -> Phase:
    """Returns the phase of that name.

    Raises:
        InputError: there is none.
    """
    found = {phase.name: phase for phase in phases_of(scenario)}
    if name not in found:
        raise InputError(
            Violation(
                field="phase",
                value=repr(name),
                rule="the scenario has no such phase",
                nearest_fix=did_you_mean(name, found),
            )
        )
    return found[name]


def _alone(scenario: Scenario, name: str, workload: Workload) -> Scenario:
    """Returns the scenario of one phase, its scaling of positions in its model."""
    model = _scaled(scenario.model, name, workload)
    workload = workload.model_copy(update={"rope_scaling": None})
    update: dict[str, object] = {"model": model, "workload": workload}
    if scenario.workload.later_phases:
        update["name"] = f"{scenario.name}_{name}"
    return scenario.model_copy(update=update)


def _scaled(model: ModelSpec, name: str, workload: Workload) -> ModelSpec:
    scaling, rope = workload.rope_scaling, model.attention.rope
    if scaling is None:
        return model
    if rope is None:
        raise InputError(
            Violation(
                field=f"workload.rope_scaling of phase {name}",
                rule=f"{model.name} has no rotary positions to scale",
                nearest_fix="leave it out",
            )
        )
    turned = rope.model_copy(update={"scaling": None if scaling == "none" else scaling})
    attention = model.attention.model_copy(update={"rope": turned})
    return model.model_copy(update={"attention": attention})
