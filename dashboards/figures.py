"""The dashboard's charts: records in, plotly figures out; only units are scaled here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flopwright.planner.result import SearchResult
from flopwright.report.compare import ClassComparison, Comparison
from flopwright.report.compare_style import (
    AFTER,
    BANDS,
    BEFORE,
    HELD_OUT,
    MEMORY_COLOURS,
    TIME_COLOURS,
    bytes_scale,
    label,
    time_scale,
)
from flopwright.report.metrics import Prediction, StepMetrics
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.sweep import LambdaSweep

Curve = Sequence[tuple[float, float]]

_HEIGHT: Final = 400
_LINE: Final = "#b3261e"
_PHASE_COLOURS: Final = ("#1f5f8b", "#c9c9c9", "#d1495b", "#9a9a9a", "#f2b134")
_BEST: Final = "#3d7a3c"


def _layout(figure: go.Figure, *, x: str, y: str, height: int = _HEIGHT, **more: Any) -> go.Figure:
    """Returns the figure with axis titles (units in them) and the legend above the chart."""
    figure.update_layout(
        height=height,
        margin={"l": 10, "r": 20, "t": 60, "b": 10},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "xanchor": "left"},
        xaxis_title=x,
        yaxis_title=y,
    )
    figure.update_layout(**more)
    return figure


def memory_figure(metrics: StepMetrics, capacity_bytes: int) -> go.Figure:
    """Returns memory by class of each stage's fullest rank, stacked under the capacity line."""
    factor, unit = bytes_scale(max(capacity_bytes, metrics.peak_memory_bytes))
    stages = [str(i) for i in range(len(metrics.memory_bytes))]
    figure = go.Figure()
    for name, colour in MEMORY_COLOURS.items():
        values = [stage.get(name, 0) * factor for stage in metrics.memory_bytes]
        if any(values):
            figure.add_bar(x=stages, y=values, name=label(name), marker_color=colour)
    figure.add_hline(
        y=capacity_bytes * factor,
        line={"color": _LINE, "dash": "dash"},
        annotation={
            "text": f"capacity {capacity_bytes * factor:.4g} {unit}",
            "font": {"color": _LINE},
        },
        annotation_position="top right",
    )
    figure.update_xaxes(type="category")
    return _layout(figure, x="pipeline stage", y=f"memory ({unit})", barmode="stack")


def step_time_figure(predictions: Mapping[str, Prediction]) -> go.Figure:
    """Returns exposed step time by class, one bar a plan, with the predicted interval."""
    labels = list(predictions)
    found = list(predictions.values())
    factor, unit = time_scale(max((p.step_time_interval.high for p in found), default=0.0))
    figure = go.Figure()
    for name, colour in TIME_COLOURS.items():
        values = [p.metrics.time_s.get(name, 0.0) * factor for p in found]
        if any(values):
            figure.add_bar(
                y=labels, x=values, name=label(name), marker_color=colour, orientation="h"
            )
    times = [p.metrics.step_time_s * factor for p in found]
    figure.add_scatter(
        y=labels,
        x=times,
        mode="markers",
        name="interval",
        marker={"color": "#333333", "symbol": "line-ns-open", "size": 12},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [
                p.step_time_interval.high * factor - t for p, t in zip(found, times, strict=True)
            ],
            "arrayminus": [
                t - p.step_time_interval.low * factor for p, t in zip(found, times, strict=True)
            ],
            "color": "#333333",
        },
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _layout(
        figure,
        x=f"step time ({unit})",
        y="",
        barmode="stack",
        height=160 + 42 * len(labels),
        legend_traceorder="normal",
    )


def pareto_figure(result: SearchResult, capacity_bytes: int) -> go.Figure:
    """Returns step time over peak memory: the front, the listed plans, those that lack memory."""
    byte_factor, byte_unit = bytes_scale(capacity_bytes)
    front = [(t.plan, t.step_time_s, (1 - t.headroom) * capacity_bytes) for t in result.front]
    ranked = [(r.plan, r.prediction.metrics.step_time_s, (1 - r.headroom) * capacity_bytes)
              for r in result.ranked]  # fmt: skip
    lacking = [(i.plan, i.step_time_s, i.peak_memory_bytes) for i in result.infeasible]
    slowest = max((row[1] for row in (*front, *ranked, *lacking)), default=0.0)
    time_factor, time_unit = time_scale(slowest)
    figure = go.Figure()
    for name, rows, colour, symbol in (
        ("no plan beats it in time, memory and cost", front, BEFORE, "circle-open"),
        ("listed above", ranked, HELD_OUT, "circle"),
        ("lacks memory", lacking, AFTER, "x"),
    ):
        if rows:
            figure.add_scatter(
                x=[row[2] * byte_factor for row in rows],
                y=[row[1] * time_factor for row in rows],
                text=[row[0].label() for row in rows],
                name=name,
                mode="markers",
                marker={"color": colour, "size": 10, "symbol": symbol},
                hovertemplate=f"%{{text}}<br>%{{x:.4g}} {byte_unit}, %{{y:.4g}} {time_unit}",
            )
    figure.add_vline(
        x=capacity_bytes * byte_factor,
        line={"color": _LINE, "dash": "dash"},
        annotation={"text": "capacity", "font": {"color": _LINE}},
        annotation_position="top right",
    )
    return _layout(
        figure, x=f"peak memory of the fullest rank ({byte_unit})", y=f"step time ({time_unit})"
    )


def completion_figure(curve: Curve, stop_fraction: float, whole: Curve) -> go.Figure:
    """Returns the share of attempts complete over time, where lambda cuts, and without a cut."""
    figure = go.Figure()
    for name, points, colour, dash in (
        ("every attempt waited for (lambda = 1)", whole, BEFORE, "dot"),
        (f"lambda = {stop_fraction:g}", curve, HELD_OUT, "solid"),
    ):
        figure.add_scatter(
            x=[p[0] for p in points],
            y=[100.0 * p[1] for p in points],
            mode="lines",
            line={"shape": "hv", "color": colour, "dash": dash},
            name=name,
        )
    figure.add_hline(
        y=100.0 * stop_fraction,
        line={"color": _LINE, "dash": "dash"},
        annotation={"text": "the round ends here", "font": {"color": _LINE}},
        annotation_position="bottom right",
    )
    figure.update_yaxes(range=[0, 105])
    return _layout(figure, x="generation time (s)", y="attempts complete (%)")


def sweep_figure(sweep: LambdaSweep) -> go.Figure:
    """Returns attempts/s and mean staleness over lambda, one above the other."""
    fractions = [p.stop_fraction for p in sweep.points]
    best, max_staleness = sweep.best_point.stop_fraction, sweep.max_mean_staleness
    rates = [p.attempts_per_s for p in sweep.points]
    staleness = [p.mean_staleness for p in sweep.points]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, values, colour in ((1, rates, HELD_OUT), (2, staleness, AFTER)):
        figure.add_scatter(
            x=fractions,
            y=values,
            mode="lines+markers",
            marker={"color": colour},
            showlegend=False,
            row=row,
            col=1,
        )
    if max_staleness is not None:
        figure.add_hline(
            y=max_staleness,
            row=2,
            col=1,
            line={"color": _LINE, "dash": "dash"},
            annotation={"text": "goal", "font": {"color": _LINE}},
            annotation_position="top left",
        )
    figure.add_vline(x=best, line={"color": _BEST, "dash": "dot"})
    figure.add_annotation(
        x=best, y=1.0, xref="x", yref="paper", yanchor="bottom", showarrow=False,
        text=f"best lambda {best:g}", font={"color": _BEST},
    )  # fmt: skip
    figure.update_yaxes(title_text="attempts/s", row=1, col=1)
    figure.update_yaxes(title_text="policy versions behind", row=2, col=1)
    figure.update_xaxes(title_text="lambda", row=2, col=1)
    figure.update_layout(height=460, margin={"l": 10, "r": 20, "t": 40, "b": 10})
    return figure


def scatter_figure(after: Sequence[Comparison], before: Sequence[Comparison] = ()) -> go.Figure:
    """Returns predicted over measured step times with bands of 10 and 20 percent."""
    pairs = {"public prior": (before, BEFORE), "this calibration": (after, AFTER)}
    steps = [c.metrics[0] for c in (*before, *after)]
    top = max((max(m.predicted, m.measured) for m in steps), default=1.0)
    low = min((min(m.predicted, m.measured) for m in steps), default=0.0)
    factor, unit = time_scale(top)
    ends = [0.8 * low * factor, 1.1 * top * factor]
    figure = go.Figure()
    for band in BANDS:
        up, down = 1 + band, 1 - band
        figure.add_scatter(
            x=[*ends, *reversed(ends)],
            y=[ends[0] * up, ends[1] * up, ends[1] * down, ends[0] * down],
            fill="toself",
            mode="none",
            fillcolor="rgba(31,95,139,0.10)",
            name=f"±{band:.0%}",
            hoverinfo="skip",
        )  # fmt: skip
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": "#777777", "width": 1}, showlegend=False
    )
    for name, (found, colour) in pairs.items():
        if not found:
            continue
        figure.add_scatter(
            x=[c.metrics[0].measured * factor for c in found],
            y=[c.metrics[0].predicted * factor for c in found],
            text=[c.plan_name for c in found],
            mode="markers",
            marker={"color": colour, "size": 11},
            name=name,
            hovertemplate=f"%{{text}}<br>measured %{{x:.4g}} {unit}, predicted %{{y:.4g}} {unit}",
        )
    return _layout(figure, x=f"measured step time ({unit})", y=f"predicted step time ({unit})")


def classes_figure(classes: Sequence[ClassComparison], *, kind: str) -> go.Figure:
    """Returns predicted and measured side by side for each class ("time" or "memory")."""
    largest = max((max(c.predicted, c.measured) for c in classes), default=0.0)
    factor, unit = (time_scale if kind == "time" else bytes_scale)(largest)
    names = [label(c.name) for c in classes]
    figure = go.Figure()
    figure.add_bar(
        x=names, y=[c.predicted * factor for c in classes], name="predicted", marker_color=AFTER
    )
    figure.add_bar(
        x=names, y=[c.measured * factor for c in classes], name="measured", marker_color=HELD_OUT
    )
    title = "exposed time a step" if kind == "time" else "memory of the fullest stage"
    return _layout(figure, x="", y=f"{title} ({unit})", barmode="group")


def phases_figure(reports: Mapping[str, RoundReport]) -> go.Figure:
    """Returns the mean steady round by phase, one bar a report."""
    labels = list(reports)
    phases = list(dict.fromkeys(p for r in reports.values() for p in r.steady.time_s))
    longest = max((r.steady.round_time_s for r in reports.values()), default=0.0)
    factor, unit = time_scale(longest)
    figure = go.Figure()
    for phase, colour in zip(phases, _PHASE_COLOURS, strict=False):
        figure.add_bar(
            y=labels,
            x=[r.steady.time_s.get(phase, 0.0) * factor for r in reports.values()],
            name=label(phase),
            marker_color=colour,
            orientation="h",
        )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return _layout(
        figure, x=f"time of a round ({unit})", y="", barmode="stack", legend_traceorder="normal"
    )
