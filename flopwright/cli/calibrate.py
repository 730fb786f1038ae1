"""`flopwright calibrate`: fit the simulator to the store's measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flopwright.report.compare_report import ErrorSummary
    from flopwright.simulator.calibration.model import Calibration


def calibrate(
    store: Annotated[
        str | None, typer.Option("--store", help="Store URL or SQLite file; default: your own.")
    ] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="Curves to start from; default: this stack's last probe."),
    ] = None,
    only_stack: Annotated[
        str | None, typer.Option("--only-stack", help="Learn from this stack's runs only.")
    ] = None,
    update: Annotated[
        str | None,
        typer.Option("--update", help="A calibration that learns from the runs it has not seen."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", help="Plan to leave out, to predict it; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="File; default: your own folder, by id.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Learn from measured runs how much slower each part of a step is than the curves say.

    It starts from the stack's own probe, else from one of the same hardware under other
    software, else from the public prior. Runs that have drifted away from a calibration since
    it was made are said.

    Example: flopwright calibrate --out calibration.yaml
    """
    from flopwright.cli._store_query import base_for, chosen_measurements
    from flopwright.report.compare import compare
    from flopwright.report.compare_report import summarise
    from flopwright.simulator.calibration.drift import drift_of
    from flopwright.simulator.calibration.files import load_calibration, save_calibration
    from flopwright.simulator.calibration.fit_runs import check_stack, fit_runs, update_runs
    from flopwright.simulator.calibration.repredict import predict_measurement

    measurements = chosen_measurements(store, only_stack=only_stack, exclude=exclude or ())
    if update is None:
        start = base_for(measurements, base)
        check_stack(start, measurements)
        before, learnt = start, fit_runs(start, measurements, predict_measurement)
    else:
        before = start = load_calibration(update)
        learnt = update_runs(start, measurements, predict_measurement)
    drift = drift_of(_latest(before, learnt), measurements, predict_measurement)
    errors = {
        name: summarise(compare(predict_measurement(c, m), m) for m in measurements)
        for name, c in (("before", start), ("after", learnt))
    }
    path = save_calibration(learnt, out)
    if as_json:
        data = {
            "calibration": learnt.to_data(),
            "file": str(path),
            "errors": {n: e.to_data() if e else None for n, e in errors.items()},
            "drift": {
                "shift": math.expm1(drift.shift_log),
                "runs": drift.runs,
                "alarm": drift.alarm,
                "text": drift.text(),
            },
        }
        typer.echo(json.dumps(data))
        return
    _show(learnt, start, errors)
    if drift.runs:
        typer.echo(f"against the last calibration of this stack: {drift.text()}")
    typer.echo(f"calibration {learnt.id}: {path}")


def _latest(before: Calibration, learnt: Calibration) -> Calibration:
    """Returns what was last learnt of this stack before now, else what the fit started from."""
    from flopwright.simulator.calibration.files import own_calibrations

    mine = (
        c
        for c in own_calibrations()
        if c.stack_id == learnt.stack_id and c.measurements and c.id != learnt.id
    )
    return next(mine, before)


def _show(learnt: Calibration, start: Calibration, errors: dict[str, ErrorSummary | None]) -> None:
    from rich.table import Table

    from flopwright.cli._console import console_of
    from flopwright.report.compare_style import label
    from flopwright.units import plural

    console = console_of(110)
    console.print(
        f"curves: {start.id} ({start.source}); learnt from "
        f"{plural(len(learnt.measurements), 'run')} of stack {learnt.stack_id}",
        highlight=False,
    )
    table = Table(title="measured / predicted by the curves alone")
    for column in ("part of a step", "factor", "known to within (1 sigma)"):
        table.add_column(column, justify="left" if column == "part of a step" else "right")
    for name, factor in learnt.factors.items():
        spread = math.exp(learnt.factor_log_std[name])
        table.add_row(label(name), f"{factor:.3f}", f"x or / {spread:.2f}")
    for name, factor in learnt.memory_factors.items():
        table.add_row(f"{label(name)} (memory)", f"{factor:.3f}", "")
    console.print(table)
    for name, found in errors.items():
        if found is not None:
            console.print(
                f"step-time error {name}: median {found.median_error:.1%}, "
                f"largest {found.max_error:.1%}",
                highlight=False,
            )
    console.print(
        f"runs scatter by {learnt.step_residual_log:.1%} (1 sigma) around the prediction",
        highlight=False,
    )
