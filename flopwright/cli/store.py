"""`flopwright store`: what the store holds, and the store as a file."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwright.store import Store


class StoreAction(StrEnum):
    """What to do."""

    SHOW = "show"
    EXPORT = "export"
    IMPORT = "import"


def store(
    action: Annotated[StoreAction, typer.Argument(help="show, export or import")],
    file: Annotated[
        Path | None, typer.Argument(help="Parquet file to write (export) or read (import).")
    ] = None,
    url: Annotated[
        str | None, typer.Option("--store", help="Store URL or SQLite file; default: your own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what the store holds, write it to a Parquet file, or add such a file to it.

    So a store moves from a laptop's file to the team's PostgreSQL.

    Example: flopwright store import runs.parquet --store postgresql://user@host/flopwright
    """
    from flopwright.store import open_store

    path = _file(action, file)
    if action is StoreAction.IMPORT:
        assert path is not None
        _import(open_store(url), path, as_json=as_json)
        return
    kept = open_store(url, create=False)
    if action is StoreAction.EXPORT:
        assert path is not None
        _export(kept, path, as_json=as_json)
    else:
        _show(kept, as_json=as_json)


def _file(action: StoreAction, file: Path | None) -> Path | None:
    from flopwright.cli._targets import check_file
    from flopwright.errors import InputError, Violation

    if (file is None) != (action is StoreAction.SHOW):
        rule = "takes no file" if file is not None else "needs a file"
        raise InputError(
            Violation(
                field="FILE",
                rule=f"'store {action}' {rule}",
                nearest_fix="" if file is not None else f"flopwright store {action} runs.parquet",
            )
        )
    if action is StoreAction.EXPORT:
        check_file("FILE", file, ".parquet", "a store is written as Parquet")
    return file


def _export(kept: Store, path: Path, *, as_json: bool) -> None:
    from flopwright.store.parquet import export_parquet
    from flopwright.units import plural

    count = export_parquet(kept, path)
    if as_json:
        typer.echo(json.dumps({"written": str(path), "records": count}))
    else:
        typer.echo(f"written: {path} ({plural(count, 'record')} of {kept.url})")


def _import(kept: Store, path: Path, *, as_json: bool) -> None:
    from flopwright.store.parquet import import_parquet
    from flopwright.units import plural

    new, known = import_parquet(kept, path)
    if as_json:
        typer.echo(json.dumps({"store": kept.url, "new": new, "already_there": known}))
    else:
        typer.echo(f"{kept.url}: {plural(new, 'new record')}, {known} there already")


def _show(kept: Store, *, as_json: bool) -> None:
    frame = kept.frame()
    if as_json:
        rows = json.loads(frame.to_json(orient="records"))
        typer.echo(json.dumps({"store": kept.url, "rows": rows}))
        return
    from rich.table import Table

    from flopwright.cli._console import console_of
    from flopwright.units import show_seconds

    table = Table(title=kept.url, title_justify="left")
    for column in ("when", "what", "name", "plan", "on", "time", "tokens/s"):
        table.add_column(
            column, justify="right" if column in {"time", "tokens/s"} else "left", overflow="fold"
        )
    times = {"step": "step_time_s", "round": "round_time_s", "stage": "wall_s"}
    for row in frame.to_dict("records"):
        speed = row["tokens_per_s"]
        table.add_row(
            str(row["created"])[:16],
            str(row["kind"]),
            str(row["plan_name"]),
            str(row["plan"] or row["phase"]),
            f"{row['world_size']} x {row['gpu']}" if row["gpu"] else "",
            show_seconds(float(row[times[str(row["kind"])]])),
            "" if speed != speed else f"{speed:,.0f}",
        )
    console_of(120).print(table)
