"""A plan's bundle, made as `flopwright export` makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flopwright.dashboards.depth import plan_file
from flopwright.executor.launch.supported import unsupported
from flopwright.plan.parallel import ParallelPlan
from flopwright.planner.export.bundle import bundle
from flopwright.planner.export.inspect import FileCheck, inspect_files, zipped
from flopwright.planner.export.registry import target_files
from flopwright.planner.fallback import fallbacks
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


def made_bundle(
    scenario: Scenario,
    plan: ParallelPlan,
    targets: Sequence[str],
    image: str | None,
    num_fallbacks: int,
) -> Bundle:
    """Returns the bundle.

    Raises:
        InputError: everything that the targets cannot express, together.
    """
    file = plan_file(scenario, plan)
    extra = target_files(file, targets, image=image)
    calibration = scenario_calibration(scenario)
    prediction, trace = predict(scenario, plan, calibration, name=file.name)
    refused = tuple(f"{v.field} {v.value}" for v in unsupported(file))
    step_s = prediction.metrics.step_time_s
    spare = fallbacks(file, step_s, calibration, num_fallbacks) if num_fallbacks else ()
    files = bundle(file, prediction, trace, refused=refused, extra=extra, fallbacks=spare)
    return Bundle(
        files=files,
        checks=inspect_files(files, file),
        omitted={f.name: tuple(f.omitted) for f in extra if f.omitted},
        refused=refused,
        archive=zipped(files),
    )
