"""loop_plan.yaml: one plan for both phases of an RL loop, and for what they share.

It says what generates and what trains, how the GPUs go from one to the other, when a round
ends, and what lies in GPU memory, host memory and on the nodes' disks in each phase.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, NonNegativeFloat

import flopwright
from flopwright.errors import InputError, Violation
from flopwright.plan.loop_parts import PER as PER
from flopwright.plan.loop_parts import PLACE_WORDS as PLACE_WORDS
from flopwright.plan.loop_parts import Budget as Budget
from flopwright.plan.loop_parts import GenerationPlan as GenerationPlan
from flopwright.plan.loop_parts import HandOver as HandOver
from flopwright.plan.loop_parts import PhaseName as PhaseName
from flopwright.plan.loop_parts import UpdatePlan as UpdatePlan
from flopwright.plan.loop_parts import Who as Who
from flopwright.spec.base import Spec
from flopwright.spec.loop import LayoutKind, LoopScenario
from flopwright.spec.validate import validate
from flopwright.spec.yaml_lines import Document, read_yaml
from flopwright.units import Seconds

LOOP_SCHEMA_VERSION: Final = 1


class PredictedLoop(Spec):
    """The prediction's summary as it stands in the plan file, of the mean steady iteration.

    Attributes:
        attempts_per_s: completed attempts over the whole time.
        mean_staleness: policy versions behind.
        usd: of one iteration; None where the cluster has no price.
        bound_by: what binds.
    """

    iteration_s: Seconds = Field(alias="iteration")
    time_s: dict[str, Seconds] = Field(alias="time", default_factory=dict)
    attempts_per_s: NonNegativeFloat
    mean_staleness: NonNegativeFloat
    gpu_hours: NonNegativeFloat
    usd: NonNegativeFloat | None = None
    bound_by: str = ""
    seed: int = 0
    rounds: int = 0


class LoopPlan(Spec):
    """The contents of loop_plan.yaml.

    Attributes:
        scenario_hash, plan_hash: content hashes of the scenario, and of layout, generation,
            update, hand_over and memory together; a plan edited by hand keeps neither.
        staleness_bound: versions an attempt may be behind in an asynchronous loop.
        memory: every place in every phase, as it was checked.
    """

    schema_version: Literal[1] = LOOP_SCHEMA_VERSION
    tool_version: str
    name: str = Field(min_length=1)
    scenario_hash: str
    plan_hash: str
    scenario: LoopScenario
    layout: LayoutKind
    staleness_bound: Annotated[int, Field(ge=0)] | None = None
    generation: GenerationPlan
    update: UpdatePlan
    hand_over: HandOver = HandOver()
    memory: tuple[Budget, ...] = ()
    predicted: PredictedLoop | None = None

    @property
    def gpus(self) -> int:
        """GPUs of the loop: those of both phases, counted once where they are the same."""
        if self.layout == "colocated":
            return self.generation.gpus
        return self.generation.gpus + self.update.gpus

    def contents_hash(self) -> str:
        """Returns the hash of what the plan decides."""
        decided = ("layout", "staleness_bound", "generation", "update", "hand_over", "memory")
        return _Decided(**{name: getattr(self, name) for name in decided}).content_hash()


class _Decided(Spec):
    layout: LayoutKind
    staleness_bound: int | None
    generation: GenerationPlan
    update: UpdatePlan
    hand_over: HandOver
    memory: tuple[Budget, ...]


def make_loop_plan(
    scenario: LoopScenario,
    name: str,
    *,
    layout: LayoutKind,
    staleness_bound: int | None,
    generation: GenerationPlan,
    update: UpdatePlan,
    hand_over: HandOver,
    memory: tuple[Budget, ...],
    predicted: PredictedLoop | None = None,
) -> LoopPlan:
    """Returns a plan with its hashes filled in."""
    plan = LoopPlan(
        tool_version=flopwright.__version__,
        name=name,
        scenario_hash=scenario.content_hash(),
        plan_hash="",
        scenario=scenario,
        layout=layout,
        staleness_bound=staleness_bound,
        generation=generation,
        update=update,
        hand_over=hand_over,
        memory=memory,
        predicted=predicted,
    )
    return plan.model_copy(update={"plan_hash": plan.contents_hash()})


def loop_plan_violations(plan: LoopPlan) -> list[Violation]:
    """Returns what a plan breaks: GPUs that are not there, phases that do not agree, memory."""
    found = []
    if plan.layout == "colocated" and plan.update.gpus != plan.generation.gpus:
        found.append(
            Violation(
                field="update.gpus",
                value=str(plan.update.gpus),
                rule="a co-located loop trains on the GPUs that generate",
                nearest_fix=str(plan.generation.gpus),
            )
        )
    parallel = plan.update.parallel
    if parallel is not None and parallel.world_size != plan.update.gpus:
        found.append(
            Violation(
                field="update.parallel",
                value=f"{parallel.world_size} ranks",
                rule=f"must use the {plan.update.gpus} GPUs that train",
            )
        )
    gpus = plan.scenario.num_gpus
    if plan.gpus > gpus:
        found.append(
            Violation(
                field="generation.gpus",
                value=str(plan.gpus),
                rule="both phases together must not use more GPUs than there are",
                limit=str(gpus),
                nearest_fix=f"leave {plan.gpus - gpus} out",
            )
        )
    broken = (budget.violation() for budget in plan.memory)
    return [*found, *(violation for violation in broken if violation is not None)]


def load_loop_plan(path: str | Path) -> LoopPlan:
    """Returns a plan file, held against its own contents.

    Raises:
        InputError: unreadable or invalid file, a newer schema, hashes that do not match, or
            a plan that breaks a rule.
    """
    document = read_yaml(Path(path))
    _check_version(document)
    plan = validate(LoopPlan, document)
    pairs = (
        ("scenario_hash", plan.scenario_hash, plan.scenario.content_hash()),
        ("plan_hash", plan.plan_hash, plan.contents_hash()),
    )
    found = [
        Violation(
            field=field,
            value=value,
            rule="does not match the contents of the file",
            nearest_fix=f"the contents hash to {actual}; make the plan again",
            file=document.file,
            line=document.line_of((field,)),
        )
        for field, value, actual in pairs
        if value != actual
    ]
    found += loop_plan_violations(plan)
    if found:
        raise InputError(found)
    return plan


def _check_version(document: Document) -> None:
    version = document.data.get("schema_version") if isinstance(document.data, dict) else None
    if isinstance(version, int) and version > LOOP_SCHEMA_VERSION:
        raise InputError(
            Violation(
                file=document.file,
                line=document.line_of(("schema_version",)),
                field="schema_version",
                value=str(version),
                rule="written by a newer flopwright",
                limit=str(LOOP_SCHEMA_VERSION),
                nearest_fix="upgrade flopwright",
            )
        )
