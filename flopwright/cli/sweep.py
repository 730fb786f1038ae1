"""`flopwright sweep`: plan every point of a scenario's grid."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from flopwright.planner.sweep import SweepRow

EXIT_INTERRUPTED = 130
MAX_ROWS_SHOWN = 40


class BackendChoice(StrEnum):
    """What runs the points."""

    JOBLIB = "joblib"
    RAY = "ray"


def sweep(
    scenario: Annotated[str, typer.Argument(help="Scenario file with a 'sweep:' block.")],
    out: Annotated[Path, typer.Option("--out", help="Write the table here (.parquet).")],
    jobs: Annotated[int, typer.Option("--jobs", min=1, max=1024, help="Processes.")] = 1,
    backend: Annotated[
        BackendChoice, typer.Option("--backend", help="ray: a local or running Ray.")
    ] = BackendChoice.JOBLIB,
    calibration: Annotated[
        str | None, typer.Option("--calibration", help="Path or id, instead of a stack.")
    ] = None,
    stack: Annotated[
        str | None,
        typer.Option("--stack", help="Software that runs it; default: as the scenario says."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Plan the scenario once for every combination of its sweep's values; write a table.

    The block gives lists by dotted field, as fields stand in a file:
    sweep: {cluster.num_nodes: [1, 2], workload.seq_len: [4096, 8192]}. Points that do not fit
    are rows too. Ctrl-C writes the rows that are done, with exit code 130.

    Example: flopwright sweep scenario.yaml --out sweep.parquet --jobs 4
    """
    from flopwright.cli._console import console_of
    from flopwright.cli._priced_by import priced_by
    from flopwright.cli._targets import check_file
    from flopwright.planner.sweep import check_installed, on_stack, run_sweep
    from flopwright.planner.sweep_table import sweep_parquet
    from flopwright.simulator.calibration.files import write_atomically
    from flopwright.spec.sweep import load_sweep

    check_file("--out", out, ".parquet", "the table is written as Parquet")
    check_installed("pyarrow")
    points = load_sweep(scenario)
    known = [priced_by(points[0].scenario, calibration, stack)] if calibration else []
    if stack is not None:
        points = tuple(on_stack(point, stack) for point in points)
    stream = run_sweep(points, *known, jobs=jobs, backend=backend.value)
    rows, whole = _collect(stream, len(points), quiet=as_json)
    write_atomically(out, sweep_parquet(rows))
    if as_json:
        data = {
            "points": len(points),
            "done": len(rows),
            "written": str(out),
            "rows": [row.to_data() for row in rows],
        }
        typer.echo(json.dumps(data))
    else:
        _show(console_of(120), rows)
        typer.echo(f"written: {out} ({len(rows)} of {len(points)} points)")
    if not whole:
        raise typer.Exit(EXIT_INTERRUPTED)


def _collect(
    stream: Iterator[SweepRow], total: int, *, quiet: bool
) -> tuple[list[SweepRow], bool]:
    """Returns the rows in the grid's order, and whether all of them were done."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    rows: list[SweepRow] = []
    with Progress(
        console=console, transient=True, disable=quiet or not console.is_terminal
    ) as bar:
        task = bar.add_task("planning points", total=total)
        try:
            for row in stream:
                rows.append(row)
                bar.update(task, advance=1)
        except KeyboardInterrupt:
            pass
    return sorted(rows, key=lambda row: row.index), len(rows) == total


def _show(console: Console, rows: list[SweepRow]) -> None:
    from rich.table import Table

    from flopwright.units import show_bytes, show_seconds

    fields = list(rows[0].values) if rows else []
    table = Table(title="Points of the sweep", title_justify="left")
    short = [name.rpartition(".")[2] for name in fields]
    heads = short if len(set(short)) == len(short) else fields
    for name in (*heads, "verdict", "plan", "step", "tokens/s/GPU", "peak", "days", "USD"):
        table.add_column(name, overflow="fold")
    for row in rows[:MAX_ROWS_SHOWN]:
        step = "" if row.step_time_s is None else show_seconds(row.step_time_s)
        peak = "" if row.peak_memory_bytes is None else show_bytes(row.peak_memory_bytes)
        table.add_row(
            *(str(row.values[name]) for name in fields),
            row.verdict.replace("_", " "),
            row.plan or row.reason,
            step,
            _number(row.tokens_per_s_per_gpu, ",.0f"),
            peak,
            _number(row.days, ".3g"),
            _number(row.usd, ",.0f"),
        )
    if len(rows) > MAX_ROWS_SHOWN:
        table.caption = f"{len(rows) - MAX_ROWS_SHOWN} more stand in the file"
    console.print(table)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
