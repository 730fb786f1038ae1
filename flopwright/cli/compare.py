"""`flopwright compare`: predicted against measured, before and after calibration."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwright.report.compare_report import ComparedRun
    from flopwright.report.metrics import Measurement
    from flopwright.simulator.calibration.model import Calibration


class GroupBy(StrEnum):
    """What runs are summed up by."""

    RUN = "run"
    PLAN = "plan"
    PHASE = "phase"
    STACK = "stack"
    RANK = "rank"


def compare(
    store: Annotated[
        str | None, typer.Option("--store", help="Store URL or SQLite file; default: your own.")
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option("--calibration", help="File or id; default: the newest of the runs' stack."),
    ] = None,
    before: Annotated[
        str | None,
        typer.Option("--before", help="What to compare it with; default: the public prior."),
    ] = None,
    plan: Annotated[
        str | None, typer.Option("--plan", help="Only the runs of this plan name.")
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Plan to leave out; may be repeated."),
    ] = None,
    by: Annotated[
        GroupBy, typer.Option("--by", help="Summaries by plan, phase, stack, or ranks and links.")
    ] = GroupBy.RUN,
    alarm: Annotated[
        bool,
        typer.Option("--alarm", help="End with exit code 1 where a plan has become slower."),
    ] = False,
    png: Annotated[Path | None, typer.Option("--png", help="Write a picture here.")] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page here; it needs no network.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show predicted against measured for the store's runs, and what is slow first.

    Every run is predicted anew from its own plan, before and after calibration. The error is
    split into what actions cost and how they fit together, and the class, kernel, rank, link
    or memory that stands out is named. Plans that became slower raise an alarm.

    Example: flopwright compare --png compare.png --html compare.html
    """
    from flopwright.cli._compare_view import show
    from flopwright.cli._console import console_of
    from flopwright.cli._store_query import chosen_measurements, warn_of_broken_calibrations
    from flopwright.cli._targets import check_file
    from flopwright.report.compare_report import make_report
    from flopwright.report.drift import find_drifts
    from flopwright.simulator.calibration.files import load_calibration, write_atomically
    from flopwright.units import plural

    check_file("--png", png, ".png", "the picture is a PNG")
    check_file("--html", html, ".html", "the page is HTML")
    measurements = chosen_measurements(store, plan=plan, exclude=exclude or ())
    if calibration is None:
        warn_of_broken_calibrations()
    after = load_calibration(calibration) if calibration else _newest(measurements)
    mine, others = _of_stack(measurements, after)
    first = load_calibration(before) if before else None
    drifts = find_drifts(measurements)
    report = make_report(_compared(store, mine, first, after), drifts)
    picture, page = _drawings(report, png, html)
    if png is not None:
        write_atomically(png, picture)
    if html is not None:
        write_atomically(html, page)
    if as_json:
        typer.echo(json.dumps(report.to_data()))
    else:
        show(console_of(130), report, by.value)
        if others:
            typer.echo(f"left out: {plural(len(others), 'run')} of other stacks", err=True)
        for path in (png, html):
            if path is not None:
                typer.echo(f"written: {path}")
    if alarm and any(d.alarm for d in drifts):
        raise typer.Exit(1)


def _newest(measurements: list[Measurement]) -> Calibration | None:
    """Returns the newest own calibration of the latest run's stack, None where there is none."""
    from flopwright.simulator.calibration.files import own_calibrations

    stack = measurements[-1].fingerprint.stack_id()
    return next((c for c in own_calibrations() if c.stack_id == stack), None)


def _of_stack(
    measurements: list[Measurement], calibration: Calibration | None
) -> tuple[list[Measurement], list[Measurement]]:
    """Returns the runs the calibration speaks of, and the others."""
    from flopwright.errors import InputError, Violation

    if calibration is None or not calibration.stack_id:
        return measurements, []
    mine = [m for m in measurements if m.fingerprint.stack_id() == calibration.stack_id]
    if not mine:
        stacks = ", ".join(sorted({m.fingerprint.stack_id() for m in measurements}))
        raise InputError(
            Violation(
                field="calibration.stack_id",
                value=calibration.stack_id,
                rule=f"no measured run is of this stack; theirs: {stacks}",
                nearest_fix="name a calibration of their stack, or run a plan on this one",
            )
        )
    return mine, [m for m in measurements if m not in mine]


def _compared(
    store: str | None,
    measurements: list[Measurement],
    before: Calibration | None,
    after: Calibration | None,
) -> Iterator[ComparedRun]:
    from flopwright.simulator.calibration.repredict import prior_of
    from flopwright.simulator.comparison.run import compared_run
    from flopwright.store import open_store

    kept = open_store(store, create=False)
    for measurement in measurements:
        prior = before or prior_of(measurement)
        trace = kept.trace(measurement.id)
        yield compared_run(measurement, prior if after else None, after or prior, trace)


def _drawings(report: object, png: Path | None, html: Path | None) -> tuple[bytes, str]:
    """Returns picture and page, drawn before anything is written."""
    from flopwright.report.compare_html import comparison_html
    from flopwright.report.compare_png import comparison_png
    from flopwright.report.compare_report import ComparisonReport

    assert isinstance(report, ComparisonReport)
    return (
        comparison_png(report) if png is not None else b"",
        comparison_html(report) if html is not None else "",
    )
