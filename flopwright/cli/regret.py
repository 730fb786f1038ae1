"""`flopwright regret`: how the planner ranks configurations that others tuned by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def regret(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="CSV of measured runs, one metric a row (docs/accuracy.md); default: the "
            "published runs that ship."
        ),
    ] = None,
    framework: Annotated[
        str,
        typer.Option("--framework", help="Whose runs, as the software stacks are named."),
    ] = "megatron_bridge",
    only: Annotated[
        str, typer.Option("--only", help="Only runs whose id, model or GPU holds this text.")
    ] = "",
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the table as JSON here; - prints it.")
    ] = None,
) -> None:
    """Rank hand-tuned configurations among all plans for the same GPUs and batch.

    Each should fit, stand among the best 5 % of what fits and be within 8 % of our best. What
    is said to be more than 8 % better is listed with its reason.

    Example: flopwright regret --only llama38b
    """
    from flopwright.cli._console import console_of
    from flopwright.cli._regret_view import show
    from flopwright.cli.accuracy import progress_bar
    from flopwright.errors import InputError, Violation
    from flopwright.planner.export.folder import check_place
    from flopwright.planner.regret import regret as judged
    from flopwright.planner.regret import tuned_runs
    from flopwright.simulator.accuracy.published_files import load_published
    from flopwright.simulator.accuracy.run_of_row import published_runs
    from flopwright.simulator.calibration.files import write_atomically

    to_stdout = json_out is not None and str(json_out) == "-"
    if json_out is not None and not to_stdout:
        check_place(json_out)
    known = (load_published() if file is None else published_runs(file)).runs
    runs = [r for r in tuned_runs(known, framework) if only in f"{r.id} {r.model_name} {r.gpu}"]
    if not runs:
        frameworks = sorted({r.stack.framework for r in known})
        raise InputError(
            Violation(
                field="file",
                value="the runs that ship" if file is None else str(file),
                rule=f"holds no timed run of {framework} with its whole split"
                + (f" and {only!r} in its id, model or GPU" if only else ""),
                nearest_fix=f"frameworks there: {', '.join(frameworks) or 'none'}",
            )
        )
    with progress_bar(quiet=to_stdout) as advance:
        found = judged(runs, advance)
    text = json.dumps(found.to_data(), indent=1)
    if to_stdout:
        typer.echo(text)
        return
    if json_out is not None:
        write_atomically(json_out, text + "\n")
    show(console_of(120), found)
    if json_out is not None:
        typer.echo(f"written: {json_out}")
