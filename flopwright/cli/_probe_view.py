"""What `flopwright probe` prints: a bar while it measures, tables and slow parts after."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flopwright.report.probe import ProbeReport
from flopwright.simulator.calibration.fit_probe import copy_bytes_per_s
from flopwright.units import show_bytes, show_seconds

_PLACE = re.compile(r"(\d+)/(\d+) (.*)")
# Where there is no terminal a line comes at most this often.
_LINE_S = 5.0


@contextmanager
def progress_display(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Gives a callback for "3/40 what comes next": a bar on a terminal, else a few lines."""
    if quiet:
        yield lambda _: None
    elif sys.stderr.isatty():
        columns = (BarColumn(), TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                   TimeElapsedColumn(), TextColumn("{task.description}"))  # fmt: skip
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("starting", total=1)

            def tell(what: str) -> None:
                place, total, text = _parts(what)
                bar.update(task, description=text, completed=place, total=total)

            yield tell
    else:
        last = [-_LINE_S]

        def line(what: str) -> None:
            if time.monotonic() - last[0] >= _LINE_S:
                last[0] = time.monotonic()
                typer.echo(f"  {what}", err=True)

        yield line


def _parts(what: str) -> tuple[int, int, str]:
    found = _PLACE.fullmatch(what)
    return (int(found[1]), int(found[2]), found[3]) if found else (0, 1, what)


def show(report: ProbeReport) -> None:
    """Prints the machine, and tables of rates and collectives; slow parts are named."""
    where = report.fingerprint
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(
        f"{where.gpu or where.processor}: {where.world_size} ranks on {where.num_cores} cores, "
        f"{where.threads_per_rank} thread(s) a rank, {show_bytes(where.memory_bytes)} of memory"
    )
    console.print(
        f"memory copy {copy_bytes_per_s(report) / 1e9:.3g} GB/s a rank (read + write); "
        f"one op costs {show_seconds(report.host_floor_s)}"
    )
    products = Table(title="matrix products and attention (median; all ranks at once)")
    for column in (
        "op",
        "dtype",
        "phase",
        "m x k x n",
        "batch",
        "time",
        "GFLOP/s",
        "p90 / median",
    ):
        products.add_column(
            column, justify="left" if column in {"op", "dtype", "phase"} else "right"
        )
    for p in report.operators:
        if p.flops:
            products.add_row(
                p.name, p.dtype, p.phase, f"{p.m:g} x {p.k:g} x {p.n:g}", f"{p.batch:g}",
                show_seconds(p.seconds), f"{p.flops / p.seconds / 1e9:.3g}",
                f"{p.seconds_p90 / p.seconds:.2f}",
            )  # fmt: skip
    console.print(products)
    if report.collectives:
        _show_collectives(report, console)
    for line in slow_parts(report):
        console.print(line, highlight=False)


def slow_parts(report: ProbeReport) -> list[str]:
    """Returns a line for checkpoints, each slow processor and each slow link."""
    lines = [
        f"checkpoints: {p.what} {p.ranks * p.nbytes / p.seconds / 1e9:.3g} GB/s in all"
        for p in report.storage
    ]
    lines += [
        f"slow processor: rank {r.rank} ({r.host}, local {r.local_rank}) takes "
        f"{r.slowdown:.2f} times as long as the others"
        for r in report.slow_ranks()
    ]
    for link in report.slow_links():
        one, two = link.ranks
        lines.append(
            f"slow link: ranks {one} and {two}, {link.nbytes / link.seconds / 1e9:.3g} GB/s"
        )
    return lines


def _show_collectives(report: ProbeReport, console: Console) -> None:
    table = Table(title="collectives between local ranks")
    for column in ("collective", "ranks", "payload (KiB)", "median", "quickest", "GB/s"):
        table.add_column(column, justify="left" if column == "collective" else "right")
    for c in report.collectives:
        table.add_row(
            c.collective, str(c.ranks), f"{c.nbytes / 1024:,.0f}", show_seconds(c.seconds),
            show_seconds(c.seconds_min), f"{c.nbytes / c.seconds / 1e9:.3g}",
        )  # fmt: skip
    console.print(table)
