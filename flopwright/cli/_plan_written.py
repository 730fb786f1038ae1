"""What `flopwright plan` writes, and how it says to go on."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from flopwright.planner.result import RankedPlan
    from flopwright.spec.scenario import Scenario

Fixed = Mapping[str, int | str | bool]

# Fields with an option of their own.
_OPTIONS = (
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "dp",
    "zero_stage",
    "micro_batch_size",
    "recompute",
    "schedule",
    "fp8_activations",
    "activation_offload",
    "optimizer_offload",
)


def check_target(out: Path | None) -> None:
    """Refuses, before anything is searched, a file that could not be written (InputError)."""
    from flopwright.errors import InputError, Violation

    if out is None:
        return
    if out.suffix not in {".yaml", ".yml"}:
        raise InputError(
            Violation(
                field="out",
                value=str(out),
                rule="a plan is written as YAML",
                nearest_fix=f"use {out.name}.yaml",
            )
        )
    if out.is_dir():
        raise InputError(Violation(field="out", value=str(out), rule="is a folder"))


def write_plan(scenario: Scenario, chosen: RankedPlan, out: Path) -> None:
    """Writes the chosen plan with what is predicted of it, at once or not at all."""
    from flopwright.planner.predicted import predicted_step
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.spec.load import dump_yaml, make_plan_file

    predicted = predicted_step(chosen.prediction)
    record = make_plan_file(scenario, chosen.plan, chosen.plan.label(), predicted)
    header = f"{scenario.name}: {chosen.plan.label()}\nrun it with: flopwright run {out.name}"
    write_atomically(out, dump_yaml(record, header))


def go_on(
    scenario: str, changes: tuple[str, ...], fixed: Fixed, out: Path | None, *, fits: bool
) -> None:
    """Prints the next command: after a plan that was written, one that was not, or none."""
    if not fits:
        typer.echo("Go on: give the scenario more GPUs, more memory, or a smaller model.")
        return
    if out is None:
        words = [word for change in changes for word in ("--set", change)]
        command = ["flopwright", "plan", scenario, *words, *_options(fixed)]
        command += ["--out", "plan.yaml"]
        typer.echo(f"Go on: {shlex.join(command)}")
        return
    path = shlex.quote(str(out))
    from flopwright.executor.launch.supported import unsupported
    from flopwright.spec.load import load_plan

    typer.echo(f"wrote {out}")
    refused = [f"{v.field} {v.value}" for v in unsupported(load_plan(out))]
    if refused:
        typer.echo(f"Go on: flopwright export {path} --to bundle")
        typer.echo(f"(flopwright run does not run this plan yet: {', '.join(refused)})")
        return
    typer.echo(f"Go on: flopwright export {path} --to bundle   or   flopwright run {path}")


def _options(fixed: Fixed) -> list[str]:
    """Returns the fixed fields as they are written on the command line."""
    out = []
    for name, value in fixed.items():
        if name not in _OPTIONS:
            out += ["--fix", f"{name}={str(value).lower() if isinstance(value, bool) else value}"]
            continue
        option = "zero" if name == "zero_stage" else name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{option}" if value else f"--no-{option}")
        else:
            out += [f"--{option}", str(value)]
    return out
