"""The accuracy report as tables on the terminal."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from flopwright.simulator.accuracy.report import AccuracyReport
from flopwright.units import plural

_COLUMNS = ("n", "covered", "median", "p90", "bias", "rank", "in 80 %")
_MOST_REASONS = 12


def show(console: Console, report: AccuracyReport) -> None:
    """Prints the scores: overall, baselines, groups, memory, and why rows were skipped."""
    data = report.to_data()
    console.print(_scores(report, data))
    cells = data["overall"]["macro"]
    if cells["cells"]:
        console.print(
            f"over {plural(cells['cells'], 'cell')}: median {_share(cells['median_abs_error'])}, "
            f"p90 {_share(cells['p90_abs_error'])}",
            highlight=False,
        )
    console.print(f"free parameters: {data['free_parameters']}", highlight=False)
    if report.memory:
        console.print(_memory(data["memory"]))
    reasons = Counter(row["reason"] for row in data["skipped"])
    for reason, count in reasons.most_common(_MOST_REASONS):
        console.print(f"skipped, {plural(count, 'row')}: {reason}", highlight=False)
    rest = sum(count for _, count in reasons.most_common()[_MOST_REASONS:])
    if rest:
        console.print(f"skipped, {plural(rest, 'row')} for other reasons (--json lists all)")


def _scores(report: AccuracyReport, data: dict[str, Any]) -> Table:
    table = Table(title=f"{report.file}: predicted against measured step time, {report.protocol}")
    table.add_column("runs", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    table.add_row("overall", *_cells(data["overall"]), end_section=False)
    for name, baseline in data["baselines"].items():
        if baseline["n"]:
            table.add_row(f"  baseline {name.replace('_', ' ')}", *_cells(baseline))
    table.add_section()
    for name, group in data["groups"].items():
        table.add_row(name, *_cells(group))
    return table


def _memory(data: dict[str, Any]) -> Table:
    table = Table(title="predicted against measured peak memory")
    table.add_column("definition")
    for name in (*_COLUMNS, "under by 5 %"):
        table.add_column(name, justify="right")
    for name, group in (("all", data), *data["groups"].items()):
        table.add_row(name, *_cells(group), _share(group["under_by_5_percent_share"]))
    return table


def _cells(score: dict[str, Any]) -> list[str]:
    rank = score["spearman"]
    return [
        str(score["n"]),
        _share(score["coverage"]),
        _share(score["median_abs_error"]),
        _share(score["p90_abs_error"]),
        "" if score["bias"] is None else f"{score['bias']:+.1%}",
        "" if rank is None else f"{rank:.2f}",
        _share(score["interval80_coverage"]),
    ]


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
