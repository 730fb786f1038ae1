"""The comparison as one HTML page that needs no network: charts, tables, where to look."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flopwright.errors import InputError, Violation
from flopwright.report.compare import ClassComparison, Comparison
from flopwright.report.compare_html_parts import alarms, details, routing, split_figure
from flopwright.report.compare_report import ComparedRun, ComparisonReport
from flopwright.report.compare_style import (
    AFTER,
    BEFORE,
    HELD_OUT,
    MEMORY_COLOURS,
    TIME_COLOURS,
    bytes_scale,
    label,
    time_scale,
)
from flopwright.units import show_seconds

_CSS = (
    "body{font-family:system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;"
    "color:#222}table{border-collapse:collapse;margin:1em 0}td,th{padding:.3em .8em;"
    "border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child{text-align:left}"
    ".runs td:last-child,.runs th:last-child{text-align:left;min-width:22em}"
    "details{margin:.6em 0}summary{cursor:pointer;font-weight:600}"
    ".alarm{background:#fdecea;border-left:4px solid #d1495b;padding:.5em 1em}"
)


def comparison_html(report: ComparisonReport) -> str:
    """Returns a self-contained page: plotly's script stands inside it.

    Raises:
        InputError: plotly is not installed.
    """
    try:
        import plotly.graph_objects as go
        import plotly.io
    except ModuleNotFoundError as error:
        raise InputError(
            Violation(rule=f"cannot draw: {error}", nearest_fix="pip install 'flopwright[plots]'")
        ) from error
    figures = [
        _step_time(go, report),
        _stacks(go, report.runs, lambda r: r.after.time_classes, TIME_COLOURS, time_scale,
                "exposed time of a step by class"),
        _stacks(go, report.runs, lambda r: r.after.memory_classes, MEMORY_COLOURS, bytes_scale,
                "memory of the fullest stage by class"),
    ]  # fmt: skip
    if any(r.after.split is not None for r in report.runs):
        figures.insert(1, split_figure(go, report.runs))
    for figure in figures:
        figure.update_layout(plot_bgcolor="#f6f7f9", margin={"t": 50, "b": 40})
    # plotly's script once, in the first chart
    charts = "\n".join(
        plotly.io.to_html(f, full_html=False, include_plotlyjs=i == 0)
        for i, f in enumerate(figures)
    )
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>predicted and measured</title><style>{_CSS}</style></head><body>"
        f"<h1>Predicted and measured</h1>{alarms(report)}{_summary(report)}{_table(report)}"
        f"{routing(report)}{details(report)}{charts}</body></html>\n"
    )


def _step_time(go: Any, report: ComparisonReport) -> Any:
    figure = go.Figure()
    names = [r.plan_name for r in report.runs]
    measured = [r.after.metrics[0].measured for r in report.runs]
    factor, unit = time_scale(max(measured, default=0.0))
    befores = [r.before for r in report.runs]
    if report.before is not None:
        was = [b.metrics[0].predicted * factor if b else None for b in befores]
        figure.add_bar(x=names, y=was, name="predicted before", marker_color=BEFORE)
    after = [r.after for r in report.runs]
    figure.add_bar(
        x=names,
        y=[c.metrics[0].predicted * factor for c in after],
        name=f"predicted, {after[0].interval.probability:.0%} interval" if after else "predicted",
        marker_color=AFTER,
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [(c.interval.high - c.metrics[0].predicted) * factor for c in after],
            "arrayminus": [(c.metrics[0].predicted - c.interval.low) * factor for c in after],
        },
    )
    figure.add_bar(
        x=names, y=[m * factor for m in measured], name="measured", marker_color=HELD_OUT
    )
    figure.update_layout(
        title="step time", barmode="group", yaxis_title=f"step time ({unit})", height=420
    )
    return figure


def _stacks(
    go: Any,
    runs: Sequence[ComparedRun],
    classes_of: Callable[[ComparedRun], Sequence[ClassComparison]],
    colours: Mapping[str, str],
    scale_of: Callable[[float], tuple[float, str]],
    title: str,
) -> Any:
    sides = ("predicted", "measured")
    totals = [sum(getattr(c, side) for c in classes_of(r)) for r in runs for side in sides]
    factor, unit = scale_of(max(totals, default=0.0))
    x = [[r.plan_name for r in runs for _ in sides], [side for _ in runs for side in sides]]
    order = {c.name: None for r in runs for c in classes_of(r)}
    figure = go.Figure()
    for name in sorted(order, key=lambda n: list(colours).index(n) if n in colours else 99):
        rows = [{c.name: c for c in classes_of(r)}.get(name) for r in runs]
        y = [getattr(c, side) * factor if c else 0.0 for c in rows for side in sides]
        colour = colours.get(name, "#777777")
        figure.add_bar(x=x, y=y, name=label(name), marker_color=colour)
    figure.update_layout(title=title, barmode="stack", yaxis_title=f"({unit})", height=420)
    return figure


def _percent(value: float | None, signed: bool = True) -> str:
    return "-" if value is None else f"{value:+.1%}" if signed else f"{value:.1%}"


def _summary(report: ComparisonReport) -> str:
    rows = [
        ("before calibration", report.before),
        ("after calibration" if report.before else "predicted", report.after),
        ("after, runs learnt from", report.fitted),
        ("after, runs not learnt from", report.held_out),
    ]
    if report.before is None:
        rows = rows[1:2]
    body = "".join(
        _row(
            name,
            str(s.runs),
            _percent(s.median_error, signed=False),
            _percent(s.max_error, signed=False),
            _percent(s.max_memory_error, signed=False),
            _percent(s.inside_interval, signed=False),
        )
        for name, s in rows
        if s is not None
    )
    floor = report.noise_floor
    note = f"<p>Noise floor of the measurements: {floor:.1%}.</p>" if floor is not None else ""
    head = _row(
        "", "runs", "median step-time error", "largest", "largest memory error", "inside interval",
        tag="th",
    )  # fmt: skip
    return f"<table>{head}{body}</table>{note}"


def _table(report: ComparisonReport) -> str:
    with_before = report.before is not None
    names = ["plan", "measured"]
    names += ["predicted before", "error before", "after", "error after"] if with_before else [
        "predicted", "error",
    ]  # fmt: skip
    head = _row(*names, "of it cost", "structure", "memory error", "what stands out", tag="th")
    body = "".join(_run_row(r, with_before=with_before) for r in report.runs)
    return f"<h2>Run by run</h2><table class='runs'>{head}{body}</table>"


def _run_row(run: ComparedRun, *, with_before: bool) -> str:
    def step(c: Comparison | None) -> str:
        return show_seconds(c.metrics[0].predicted) if c else "-"

    after, split = run.after, run.after.split
    learnt = " (not learnt from)" if run.held_out and with_before else ""
    before = [
        step(run.before),
        _percent(run.before.error("step_time_s") if run.before else None),
    ]
    return _row(
        run.plan_name + learnt,
        show_seconds(after.metrics[0].measured),
        *(before if with_before else ()),
        step(after),
        _percent(after.error("step_time_s")),
        _percent(split.cost if split else None),
        _percent(split.structure if split else None),
        _percent(after.error("tensor_memory_bytes")),
        after.worst.text if after.worst else "-",
    )


def _row(*cells: str, tag: str = "td") -> str:
    return f"<tr>{''.join(_cells(cells, tag))}</tr>"


def _cells(cells: Iterable[str], tag: str) -> Iterable[str]:
    return (f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
