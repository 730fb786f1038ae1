"""A plan's bundle, made as `flopwright export` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flopwright.dashboards.depth import plan_file, predicted
from flopwright.dashboards.results import results
from flopwright.dashboards.working import work
from flopwright.executor.launch.supported import unsupported
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.bundle import bundle
from flopwright.planner.export.inspect import FileCheck, inspect_files, zipped
from flopwright.planner.export.registry import target_files
from flopwright.planner.fallback import Fallback
from flopwright.planner.plan_text import plan_words
from flopwright.simulator.accuracy.named_stacks import scenario_calibration
from flopwright.simulator.training.predict import predict
from flopwright.spec.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files of a launch.

    Attributes:
        omitted: by file, what its target cannot say of the plan.
        refused: what this version's own executor does not run of it.
    """

    files: dict[str, bytes]
    checks: tuple[FileCheck, ...]
    omitted: dict[str, tuple[str, ...]]
    refused: tuple[str, ...]
    archive: bytes


def spare_plans(scenario: Scenario, plan: ParallelPlan, count: int) -> tuple[Fallback, ...] | None:
    """Returns plans for fewer nodes; None while they are searched for, which is drawn."""
    if not count:
        return ()
    return work(
        "fallbacks",
        scenario,
        _fallbacks,
        again="Plan for fewer nodes",
        more=f"{plan_words(plan)}; {count}",
        failed="This plan has none for fewer nodes",
        plan=plan_file(scenario, plan).to_data(),
        step_time_s=predicted(scenario, plan).metrics.step_time_s,
        count=count,
    )


def _fallbacks(data: Any) -> tuple[Fallback, ...]:
    return tuple(Fallback.model_validate(one) for one in data)


def made_bundle(
    scenario: Scenario,
    plan: ParallelPlan,
    targets: Sequence[str],
    image: str | None,
    spare: Sequence[Fallback] = (),
) -> Bundle:
    """Returns the bundle.

    Raises:
        InputError: everything that the targets cannot express, together.
    """
    kind = f"bundle {plan_words(plan)} {sorted(targets)} {image} {len(spare)}"
    kept = results().get(kind, scenario)
    if kept is None:
        kept = _made(scenario, plan, targets, image, spare)
        results().put(kind, scenario, kept)
    assert isinstance(kept, Bundle)
    return kept


def _made(
    scenario: Scenario,
    plan: ParallelPlan,
    targets: Sequence[str],
    image: str | None,
    spare: Sequence[Fallback],
) -> Bundle:
    file = plan_file(scenario, plan)
    extra = target_files(file, targets, image=image)
    prediction, trace = predict(scenario, plan, scenario_calibration(scenario), name=file.name)
    refused = tuple(f"{v.field} {v.value}" for v in unsupported(file))
    files = bundle(file, prediction, trace, refused=refused, extra=extra, fallbacks=spare)
    return Bundle(
        files=files,
        checks=inspect_files(files, file),
        omitted={f.name: tuple(f.omitted) for f in extra if f.omitted},
        refused=refused,
        archive=zipped(files),
    )
