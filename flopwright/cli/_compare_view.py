"""The comparison as tables on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from flopwright.report.compare import Comparison
from flopwright.report.compare_report import ComparedRun, ComparisonReport, ErrorSummary
from flopwright.units import show_seconds


def show(console: Console, report: ComparisonReport) -> None:
    """Prints each run, predicted and measured, then the summaries and where to look first."""
    console.print(_runs_table(report))
    console.print(_summary_table(report))
    if report.noise_floor is not None:
        console.print(
            f"noise floor: {report.noise_floor:.1%}; an error below it says nothing",
            highlight=False,
        )
    for run in report.runs:
        if run.after.worst is not None:
            console.print(f"look first, {run.plan_name}: {run.after.worst.text}", highlight=False)


def _runs_table(report: ComparisonReport) -> Table:
    table = Table(title=f"predicted and measured step time; {_calibrations(report)}")
    columns = ["plan", "measured", "predicted", "error"]
    if report.before is not None:
        columns = ["plan", "learnt from", "measured", "before", "error", "after", "error"]
    for column in (*columns, "80 % interval", "tensor memory error"):
        left = column == "plan"
        table.add_column(column, justify="left" if left else "right", overflow="fold")
    for run in report.runs:
        table.add_row(*_cells(run, with_before=report.before is not None))
    return table


def _calibrations(report: ComparisonReport) -> str:
    """Returns which calibrations the columns are of; without one only the prior predicts."""
    after = report.after_calibration or "none"
    if report.before is None:
        public = all(run.after.provenance == "analytic" for run in report.runs)
        return f"predicted by {'the public prior ' if public else ''}{after}"
    return f"before: {report.before_calibration or 'none'}, after: {after}"


def _cells(run: ComparedRun, *, with_before: bool) -> list[str]:
    after = run.after
    cells = [run.plan_name]
    if with_before:
        cells += ["no" if run.held_out else "yes"]
    cells += [show_seconds(after.metrics[0].measured)]
    if with_before:
        cells += [_predicted(run.before), _percent(run.before, "step_time_s")]
    outside = "" if after.metrics[0].in_interval else " (outside)"
    interval = f"{show_seconds(after.interval.low)} .. {show_seconds(after.interval.high)}"
    return [
        *cells,
        _predicted(after),
        _percent(after, "step_time_s"),
        interval + outside,
        _percent(after, "tensor_memory_bytes"),
    ]


def _predicted(comparison: Comparison | None) -> str:
    return "-" if comparison is None else show_seconds(comparison.metrics[0].predicted)


def _percent(comparison: Comparison | None, metric: str) -> str:
    error = None if comparison is None else comparison.error(metric)
    return "-" if error is None else f"{error:+.1%}"


def _summary_table(report: ComparisonReport) -> Table:
    table = Table(title="step-time errors")
    for column in ("", "runs", "median", "largest", "largest memory", "inside interval"):
        table.add_column(column, justify="right" if column else "left")
    rows: tuple[tuple[str, ErrorSummary | None], ...] = (("predicted", report.after),)
    if report.before is not None:
        rows = (
            ("before", report.before),
            ("after", report.after),
            ("after, runs learnt from", report.fitted),
            ("after, runs not learnt from", report.held_out),
        )
    for name, found in rows:
        if found is not None:
            memory = found.max_memory_error
            table.add_row(
                name,
                str(found.runs),
                f"{found.median_error:.1%}",
                f"{found.max_error:.1%}",
                "-" if memory is None else f"{memory:.1%}",
                f"{found.inside_interval:.0%}",
            )
    return table
