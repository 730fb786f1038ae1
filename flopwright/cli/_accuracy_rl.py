"""`flopwright accuracy --kind rl`: the report for a person."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flopwright.simulator.accuracy.rl.report import RlReport, median_and_p90
from flopwright.simulator.accuracy.rl.score import Scored


def show_rl(console: Console, report: RlReport) -> None:
    """Prints figures, scenarios, every row, every comparison, and every row left out with why."""
    console.print(_summary(report))
    console.print(_scenarios(report))
    for title, classes in (("absolute", ("F1", "F2")), ("ratios", ("R",))):
        rows = report.absolute(*classes)
        if rows:
            console.print(_rows(title, rows))
    if report.ordered:
        console.print(_orders(report))
    if report.fitted:
        table = Table(title="fitted on rows that are not scored", title_justify="left")
        for name in ("scenario", "unknown", "row", "value"):
            table.add_column(name)
        for f in report.fitted:
            table.add_row(f.scenario, f.field, f.row, f"{f.value:.6g}")
        console.print(table)
    if report.chosen:
        table = Table(title="fitted once for a system or an engine", title_justify="left")
        for name in ("of", "number", "rows", "value"):
            table.add_column(name)
        for c in report.chosen:
            table.add_row(", ".join(c.of), c.field, ", ".join(c.rows), f"{c.value:.6g}")
        console.print(table)
    console.print(f"{report.assumed} inputs are assumed; each scenario lists its own.")
    console.print(_skipped(report))


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _summary(report: RlReport) -> Table:
    table = Table(title="published RL rows", title_justify="left")
    for name in ("class", "rows", "covered", "median error", "9 of 10 within", "undetermined"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for label, classes in (("absolute", ("F1", "F2")), ("  F1", ("F1",)), ("  F2", ("F2",)),
                           ("ratio", ("R",))):  # fmt: skip
        rows = report.absolute(*classes)
        median, p90 = median_and_p90(rows)
        done, lost = len({r.id for r in rows}), len({s.id for s in report.lost(*classes)})
        open_ = len({r.id for r in rows if r.undetermined})
        table.add_row(label, str(done), f"{done}/{done + lost}", _percent(median), _percent(p90),
                      str(open_) if open_ else "")  # fmt: skip
    right, n = sum(o.right for o in report.ordered), len(report.ordered)
    share = f"{right}/{n} right" if n else ""
    table.add_row("order", str(n), f"{n}/{n + len(report.lost('O'))}", share, "", "")
    return table


def _scenarios(report: RlReport) -> Table:
    """Returns a line a scenario: its rows by class, how far off they are, what it lost."""
    table = Table(title="by scenario", title_justify="left")
    for name in ("scenario", "absolute", "median error", "largest", "ratios", "median error",
                 "largest", "orders right", "not predicted"):  # fmt: skip
        left = name == "scenario"
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for scenario in report.scenarios:
        cells = [scenario]
        for classes in (("F1", "F2"), ("R",)):
            rows = [r for r in report.absolute(*classes) if r.scenario == scenario]
            cells += _errors(rows)
        orders = [o for o in report.ordered if o.scenario == scenario]
        right = sum(o.right for o in orders)
        lost = sum(s.lost and s.scenario == scenario for s in report.skipped)
        cells += [f"{right}/{len(orders)}" if orders else "", str(lost) if lost else ""]
        table.add_row(*cells)
    return table


def _errors(rows: Sequence[Scored]) -> list[str]:
    """Returns how many rows (parts of one cell are one), and their median and largest error."""
    if not rows:
        return ["", "", ""]
    errors = [abs(r.error) for r in rows]
    return [str(len({r.id for r in rows})), f"{median(errors):.1%}", f"{max(errors):.1%}"]


def _rows(title: str, rows: tuple[Scored, ...]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("row", "class", "scenario", "metric", "predicted", "measured", "error", "band"):
        table.add_column(name, justify="right" if name in {"predicted", "measured"} else "left")
    for r in rows:
        band = f"{r.low:.4g} .. {r.high:.4g}" if r.low != r.high else ""
        if r.undetermined:
            band += " undetermined"
        name = r.id if r.part is None else f"{r.id} [{r.part}]"
        table.add_row(escape(name), r.row_class, r.scenario, r.metric, f"{r.predicted:.4g}",
                      f"{r.measured:.4g}", f"{r.error:+.1%}", band)  # fmt: skip
    return table


def _orders(report: RlReport) -> Table:
    table = Table(title="orders and bounds", title_justify="left")
    for name in ("row", "scenario", "comparison", ""):
        table.add_column(name)
    for o in report.ordered:
        for check, ok in o.checks:
            table.add_row(o.id, o.scenario, check, "holds" if ok else "does not hold")
    return table


def _skipped(report: RlReport) -> Table:
    table = Table(title=f"left out: {len(report.skipped)} rows", title_justify="left")
    for name in ("row", "class", "why"):
        table.add_column(name)
    for s in sorted(report.skipped, key=lambda s: (not s.lost, s.id)):
        table.add_row(s.id, s.row_class, escape(s.why))
    return table
