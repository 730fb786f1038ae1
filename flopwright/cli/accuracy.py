"""`flopwright accuracy`: predictions beside published measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from flopwright.errors import InputError, Violation

Advance = Callable[[int, int], None]


def accuracy(
    file: Annotated[
        Path | None,
        typer.Argument(
            help="CSV of measured runs, one metric a row (docs/accuracy.md); default: the "
            "published runs that ship."
        ),
    ] = None,
    by: Annotated[
        str, typer.Option("--by", help="Group by these labels, e.g. source,gpu,model.")
    ] = "",
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the report as JSON here; - prints it.")
    ] = None,
    cross_validate: Annotated[
        str | None,
        typer.Option(
            "--cross-validate",
            help="cell or stack: leave each out, fit the others, predict what was left out.",
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", help="Write a scatter plot here.")] = None,
    table: Annotated[
        Path | None,
        typer.Option("--table", help="Write the runs as Parquet here (docs/store.md)."),
    ] = None,
    kind: Annotated[
        str,
        typer.Option("--kind", help="training, or rl: RL and serving rows (docs/rl_accuracy.md)."),
    ] = "training",
    scenarios: Annotated[
        Path | None,
        typer.Option(
            "--scenarios", help="With --kind rl: directory of scenarios; default: those that ship."
        ),
    ] = None,
) -> None:
    """Predict published runs and show how far off the predictions are.

    Without --cross-validate the committed stacks predict: what a user gets. With it, every
    run is predicted by a fit that saw neither it nor its cell (or its software stack).

    With --kind rl the rows are of RL runs and serving, and each is predicted by the scenario
    of a directory that names it.

    Example: flopwright accuracy training_runs.csv --by gpu --png accuracy.png
    """
    if _is_rl(kind, scenarios, by=by, cross_validate=cross_validate, png=png, table=table):
        _accuracy_rl(file, scenarios, json_out)
        return
    from flopwright.cli._accuracy_view import show
    from flopwright.cli._console import console_of
    from flopwright.cli._own_plan import own_plan
    from flopwright.cli._targets import check_file
    from flopwright.planner.export.folder import check_place
    from flopwright.planner.sweep import check_installed
    from flopwright.simulator.accuracy.figure import accuracy_png
    from flopwright.simulator.accuracy.report_make import accuracy_report
    from flopwright.simulator.accuracy.table import accuracy_frame
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.store.frame_files import parquet_bytes

    folds = _folds(cross_validate)
    to_stdout = json_out is not None and str(json_out) == "-"
    check_file("--png", png, ".png", "the picture is a PNG")
    check_file("--table", table, ".parquet", "the table is written as Parquet")
    if table is not None:
        check_installed("pyarrow")
    if json_out is not None and not to_stdout:
        check_place(json_out)
    labels = [name.strip() for name in by.split(",") if name.strip()]
    with progress_bar(quiet=to_stdout) as advance:
        report = accuracy_report(file, labels, folds, own_plan, advance)
    if table is not None:
        write_atomically(table, parquet_bytes(accuracy_frame(report)))
    if png is not None:
        write_atomically(png, accuracy_png(report))
    if to_stdout:
        typer.echo(json.dumps(report.to_data()))
        return
    if json_out is not None:
        write_atomically(json_out, json.dumps(report.to_data(), indent=1) + "\n")
    show(console_of(110), report)
    for path in (json_out, png, table):
        if path is not None:
            typer.echo(f"written: {path}")


def _is_rl(
    kind: str,
    scenarios: Path | None,
    *,
    by: str,
    cross_validate: str | None,
    png: Path | None,
    table: Path | None,
) -> bool:
    """Returns whether RL rows are asked for; options of the other kind are refused."""
    wrong = []
    if kind not in {"training", "rl"}:
        wrong.append(Violation(field="--kind", value=kind, rule="no such kind of rows",
                               nearest_fix="training or rl"))  # fmt: skip
    if kind == "training" and scenarios is not None:
        wrong.append(Violation(field="--scenarios", rule="goes with --kind rl",
                               nearest_fix="add --kind rl"))  # fmt: skip
    if kind == "rl":
        given = {
            "--by": by, "--cross-validate": cross_validate, "--png": png, "--table": table,
        }  # fmt: skip
        wrong.extend(
            Violation(field=name, value=str(value), rule="does not go with --kind rl",
                      nearest_fix="leave it out")
            for name, value in given.items() if value
        )  # fmt: skip
    if wrong:
        raise InputError(wrong)
    return kind == "rl"


def _accuracy_rl(file: Path | None, scenarios: Path | None, json_out: Path | None) -> None:
    from flopwright.cli._accuracy_rl import show_rl
    from flopwright.cli._console import console_of
    from flopwright.planner.export.folder import check_place
    from flopwright.simulator.accuracy.rl.load import FOLDER
    from flopwright.simulator.accuracy.rl.report import rl_report
    from flopwright.simulator.calibration.files import write_atomically

    to_stdout = json_out is not None and str(json_out) == "-"
    if json_out is not None and not to_stdout:
        check_place(json_out)
    if file is None:
        raise InputError(
            Violation(field="FILE", rule="--kind rl needs a CSV of measured rows",
                      nearest_fix="give the file; docs/rl_accuracy.md describes it")
        )  # fmt: skip
    with progress_bar(quiet=to_stdout) as advance:
        report = rl_report(file, scenarios or FOLDER, advance)
    if to_stdout:
        typer.echo(json.dumps(report.to_data()))
        return
    if json_out is not None:
        write_atomically(json_out, json.dumps(report.to_data(), indent=1) + "\n")
    show_rl(console_of(130), report)
    if json_out is not None:
        typer.echo(f"written: {json_out}")


def _folds(text: str | None) -> Literal["cell", "stack"] | None:
    if text is None:
        return None
    if text == "cell":
        return "cell"
    if text == "stack":
        return "stack"
    raise InputError(
        Violation(
            field="--cross-validate", value=text, rule="what is left out at a time",
            nearest_fix="cell or stack",
        )
    )  # fmt: skip


@contextmanager
def progress_bar(*, quiet: bool) -> Iterator[Advance | None]:
    """Yields a callback that moves a bar on stderr; nothing is drawn where no person looks."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("runs", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
