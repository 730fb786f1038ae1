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
    stack: Annotated[
        str | None,
        typer.Option("--stack", help="software stack to price with; default: as the plan says"),
    ] = None,
    fallback_plans: Annotated[
        int,
        typer.Option(
            "--fallbacks", min=0, max=10, help="plans for fewer nodes to write beside it, at most"
        ),
    ] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Write the files that launch a plan: scripts, DeepSpeed JSON, expected numbers, bounds.

    Example: flopwright export plan.yaml --to bundle --target megatron --target skypilot
    """
    from flopwright.executor.launch.supported import unsupported
    from flopwright.planner.export.bundle import EXECUTABLE, bundle
    from flopwright.planner.export.folder import check_folder, write_folder
    from flopwright.planner.export.registry import target_files
    from flopwright.planner.fallback import fallbacks
    from flopwright.simulator.training.predict import predict
    from flopwright.spec.load import load_plan
    from flopwright.units import plural

    plan_file = load_plan(plan)
    _check_runnable(plan_file)
    extra = target_files(plan_file, target or (), image=image)
    check_folder(to, (), force=force)
    priced = _calibration(plan_file, calibration, stack)
    ranks = plural(plan_file.parallel.world_size, "rank")
    _say(f"predicting a step of {plan_file.scenario.model.name} on {ranks}", quiet=as_json)
    prediction, trace = predict(
        plan_file.scenario, plan_file.parallel, priced, name=plan_file.name
    )
    refused = [f"{v.field} {v.value}" for v in unsupported(plan_file)]
    step_s = prediction.metrics.step_time_s
    if fallback_plans:
        _say("searching plans for fewer nodes (--fallbacks 0 leaves them out)", quiet=as_json)
    spare = fallbacks(plan_file, step_s, priced, fallback_plans) if fallback_plans else ()
    files = bundle(plan_file, prediction, trace, refused=refused, extra=extra, fallbacks=spare)
    write_folder(to, files, executable=EXECUTABLE, force=force)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "folder": str(to),
                    "files": {name: len(content) for name, content in sorted(files.items())},
                    "prediction": prediction.to_data(),
                    "refused_by_executor": refused,
                    "fallbacks": [f.to_data() for f in spare],
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


def _say(text: str, *, quiet: bool) -> None:
    """Says on stderr what is being worked at: a large plan takes half a minute."""
    if not quiet:
        typer.echo(f"{text} ...", err=True)


def _calibration(plan: PlanFile, wanted: str | None, stack: str | None) -> Calibration:
    from flopwright.cli._priced_by import priced_by

    named = plan.predicted.calibration_id if plan.predicted is not None else None
    if wanted is None and stack is None:
        wanted = named
    return priced_by(plan.scenario, wanted, stack)


def _check_runnable(plan: PlanFile) -> None:
    from flopwright.errors import InputError
    from flopwright.plan.parallel import plan_violations

    found = plan_violations(plan.parallel, plan.scenario)
    if found:
        raise InputError(found)
