"""The comparison as tables on the terminal."""

from __future__ import annotations

from typing import Final, cast

from rich.console import Console
from rich.table import Table

from flopwright.report.compare import Comparison
from flopwright.report.compare_report import (
    ComparedRun,
    ComparisonReport,
    ErrorSummary,
    GroupKey,
    by_group,
)
from flopwright.report.findings import RankRow, link_label
from flopwright.units import show_seconds

MAX_ROWS: Final = 16


def show(console: Console, report: ComparisonReport, by: str = "run") -> None:
    """Prints each run, predicted and measured, then the summaries and where to look first.

    Args:
        by: "plan", "phase" or "stack" adds a summary by it; "rank" the ranks, links and kernels
            of every run that told them apart.
    """
    console.print(_runs_table(report))
    console.print(_summary_table(report))
    if by in {"plan", "phase", "stack"}:
        console.print(_group_table(report, cast(GroupKey, by)))
    if by == "rank":
        for run in report.runs:
            for table in parts_tables(run):
                console.print(table)
    if report.noise_floor is not None:
        console.print(
            f"noise floor: {report.noise_floor:.1%}; an error below it says nothing",
            highlight=False,
        )
    for run in report.runs:
        if run.after.worst is not None:
            console.print(f"look first, {run.plan_name}: {run.after.worst.text}", highlight=False)
        for finding in run.after.findings[1:3]:
            console.print(f"  then {finding.text}", highlight=False)
    for run in report.runs:
        line = run.routing_text()
        if line:
            console.print(line, highlight=False)
    for drift in report.drifts:
        if drift.alarm:
            console.print(f"[bold red]slower:[/] {drift.text()}", highlight=False)


def _group_table(report: ComparisonReport, by: GroupKey) -> Table:
    table = Table(title=f"step-time errors by {by}")
    for column in (by, "runs", "median", "largest", "largest memory", "inside interval"):
        table.add_column(column, justify="left" if column == by else "right", overflow="fold")
    for name, found in by_group(report, by).items():
        table.add_row(name or "not said", *_summary_cells(found))
    return table


def parts_tables(run: ComparedRun) -> list[Table]:
    """Returns tables of a run's ranks, links and kernels, the furthest off first."""
    after, tables = run.after, []
    rows: tuple[tuple[str, list[tuple[str, float, float]]], ...] = (
        ("rank", [_rank_cells(r) for r in after.ranks]),
        ("link", [(link_label(x.cls, x.ranks), x.predicted_s, x.measured_s) for x in after.links]),
        ("kernel class", [(k.name, k.predicted_s, k.measured_s) for k in after.kernels]),
    )
    for what, found in rows:
        if not found:
            continue
        table = Table(title=f"{run.plan_name}: busy seconds by {what}")
        for column in (what, "predicted", "measured", "error"):
            table.add_column(column, justify="left" if column == what else "right")
        for name, predicted, measured in sorted(found, key=lambda r: -abs(r[1] - r[2]))[:MAX_ROWS]:
            error = f"{predicted / measured - 1:+.1%}" if measured > 0 else "-"
            table.add_row(name, show_seconds(predicted), show_seconds(measured), error)
        if len(found) > MAX_ROWS:
            table.caption = f"{len(found) - MAX_ROWS} more stand in --json"
        tables.append(table)
    return tables


def _rank_cells(row: RankRow) -> tuple[str, float, float]:
    name = f"{row.rank} (stage {row.stage}), compute"
    return name, row.compute_predicted_s, row.compute_measured_s


def _runs_table(report: ComparisonReport) -> Table:
    table = Table(title=f"predicted and measured step time; {_calibrations(report)}")
    columns = ["plan", "measured", "predicted", "error"]
    if report.before is not None:
        columns = ["plan", "learnt from", "measured", "before", "error", "after", "error"]
    for column in (*columns, "of it cost, structure", "80 % interval", "tensor memory error"):
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
        _split(after),
        interval + outside,
        _percent(after, "tensor_memory_bytes"),
    ]


def _split(comparison: Comparison) -> str:
    found = comparison.split
    return "-" if found is None else f"{found.cost:+.1%}, {found.structure:+.1%}"


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
            table.add_row(name, *_summary_cells(found))
    return table


def _summary_cells(found: ErrorSummary) -> list[str]:
    memory = found.max_memory_error
    return [
        str(found.runs),
        f"{found.median_error:.1%}",
        f"{found.max_error:.1%}",
        "-" if memory is None else f"{memory:.1%}",
        f"{found.inside_interval:.0%}",
    ]
