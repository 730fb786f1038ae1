"""`flopwright import-model`: a Hugging Face config.json becomes a model file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from flopwright.errors import InputError, Violation


def import_model(
    config: Annotated[Path, typer.Argument(help="A config.json, or the folder that holds it.")],
    out: Annotated[Path, typer.Option("--out", help="Model file to write.")] = Path("model.yaml"),
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the model; default the config's own.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the model as JSON.")] = False,
) -> None:
    """Turn a Hugging Face config.json into a model file that scenarios can name.

    Says what the model file leaves out (dropout, quantization, prediction layers). A field
    that is unknown, or that a model file cannot express, ends it with the field's name.

    Example: flopwright import-model Kimi-K2-Base/config.json --out kimi_k2.yaml
    """
    from flopwright.models.hf.config import import_config
    from flopwright.spec.load import dump_yaml
    from flopwright.spec.parameters import num_active_params, num_params

    imported = import_config(config, name)
    write_new(out, dump_yaml(imported.spec), force=force)
    spec, total, active = (
        imported.spec,
        num_params(imported.spec),
        num_active_params(imported.spec),
    )
    if as_json:
        data = {
            "file": str(out),
            "model": spec.to_data(),
            "params": total,
            "active_params": active,
            "left_out": list(imported.notes),
        }
        typer.echo(json.dumps(data))
        return
    typer.echo(
        f"{out}: {spec.name}, family {spec.family}, {total:,} parameters, {active:,} active"
    )
    for note in imported.notes:
        typer.echo(f"  left out: {note}")


def write_new(out: Path, text: str, *, force: bool) -> None:
    """Writes a file whole or not at all.

    Raises:
        InputError: it exists (without `force`) or cannot be written.
    """
    from flopwright.simulator.calibration.files import write_atomically

    if out.exists() and not force:
        raise InputError(
            Violation(
                file=str(out),
                rule="the file exists",
                nearest_fix="name another, or give --force",
            )
        )
    write_atomically(out, text)
