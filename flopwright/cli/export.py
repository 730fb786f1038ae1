"""`flopwright export`: the files that launch a plan, with its expected numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwright.plan.file import PlanFile
    from flopwright.simulator.calibration.model import Calibration


def export(
    plan: Annotated[Path, typer.Argument(help="plan.yaml, as `flopwright plan` writes it")],
    to: Annotated[Path, typer.Option("--to", help="folder for the bundle; new or empty")],
    force: Annotated[
        bool, typer.Option("--force", help="write over a bundle; other files in the folder stay")
    ] = False,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="path or id; default: as the plan says")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            help="a further launcher or framework (repeat it): accelerate, dstack, kubeflow, "
            "megatron, skypilot, torchtitan, verl",
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option("--image", help="container image, for kubeflow and dstack")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Write the files that launch a plan: scripts, DeepSpeed JSON, expected numbers, bounds.

    Example: flopwright export plan.yaml --to bundle --target megatron --target skypilot
    """
    from flopwright.executor.launch.supported import unsupported
    from flopwright.planner.export.bundle import EXECUTABLE, bundle
    from flopwright.planner.export.folder import write_folder
    from flopwright.planner.export.registry import target_files
    from flopwright.simulator.training.predict import predict
    from flopwright.spec.load import load_plan

    plan_file = load_plan(plan)
    _check_runnable(plan_file)
    extra = target_files(plan_file, target or (), image=image)
    prediction, trace = predict(
        plan_file.scenario,
        plan_file.parallel,
        _calibration(plan_file, calibration),
        name=plan_file.name,
    )
    refused = [f"{v.field} {v.value}" for v in unsupported(plan_file)]
    files = bundle(plan_file, prediction, trace, refused=refused, extra=extra)
    write_folder(to, files, executable=EXECUTABLE, force=force)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "folder": str(to),
                    "files": {name: len(content) for name, content in sorted(files.items())},
                    "prediction": prediction.to_data(),
                    "refused_by_executor": refused,
                    "not_expressed": {f.name: list(f.omitted) for f in extra if f.omitted},
                }
            )
        )
        return
    width = max(map(len, files))
    typer.echo(f"wrote {len(files)} files to {to}:")
    for name, content in sorted(files.items()):
        typer.echo(f"  {name:{width}}  {len(content):>9,} bytes")
    for file in extra:
        for text in file.omitted:
            typer.echo(f"{file.name} does not say: {text}")
    if refused:
        typer.echo(f"flopwright run does not run this plan yet: {', '.join(refused)}")
    typer.echo(f"next: read {to / 'README.md'}, then {to / 'torchrun.sh'} or sbatch it")


def _calibration(plan: PlanFile, wanted: str | None) -> Calibration | None:
    from flopwright.simulator.calibration.files import load_calibration

    if wanted is not None:
        return load_calibration(wanted)
    named = plan.predicted.calibration_id if plan.predicted is not None else None
    return load_calibration(named) if named is not None else None


def _check_runnable(plan: PlanFile) -> None:
    from flopwright.errors import InputError
    from flopwright.plan.parallel import plan_violations

    found = plan_violations(plan.parallel, plan.scenario)
    if found:
        raise InputError(found)
