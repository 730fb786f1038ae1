"""How far a tournament is: a bar of its time on a terminal, a line a round elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from flopwright.executor.launch.progress import Progress


@contextmanager
def progress_display(budget_s: float, spent_s: float, *, quiet: bool) -> Iterator[Progress]:
    """Gives a callback for the launches that shows progress on stderr.

    Args:
        budget_s: of all that runs; spent_s of it were used before.
        quiet: show nothing.
    """
    if quiet:
        yield lambda event: None
    elif sys.stderr.isatty():
        with _bar(budget_s, spent_s) as show:
            yield show
    else:
        yield _lines()


def words(event: dict[str, Any]) -> str:
    """Returns what is happening: a phase, or a plan's newest step."""
    if "plan" not in event:
        return str(event["phase"])
    return f"{event['plan']}: step {event['step']}, {event['tokens_per_s']:,.0f} tokens/s"


def _lines() -> Progress:
    """Returns a callback that writes each phase once and each plan's first turns."""
    said: set[str] = set()

    def show(event: dict[str, Any]) -> None:
        first = event["plan"] if "plan" in event else event["phase"].partition(":")[0]
        if first == "train":  # another launch begins: its plans are named again
            said.clear()
        if first not in said:
            said.add(first)
            typer.echo(words(event), err=True)

    return show


@contextmanager
def _bar(budget_s: float, spent_s: float) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    columns = (
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} s"),
        TextColumn("{task.description}"),
    )
    began = time.monotonic() - spent_s
    with Progress(*columns, console=Console(stderr=True)) as bars:
        task = bars.add_task("starting", total=budget_s)

        def show(event: dict[str, Any]) -> None:
            passed = min(budget_s, time.monotonic() - began)
            bars.update(task, completed=passed, description=words(event))

        yield show
