"""The dashboard's charts: records in, plotly figures out; only units are scaled here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go

from flopwright.dashboards.palette import (
    BAND,
    BLUE,
    GREY,
    INK,
    LIMIT,
    MEMORY_COLOURS,
    RED,
    TIME_COLOURS,
)
from flopwright.planner.result import SearchResult
from flopwright.planner.sensitivity import Sensitivity
from flopwright.planner.sweep import SweepRow
from flopwright.report.compare import ClassComparison, Comparison
from flopwright.report.compare_style import BANDS, bytes_scale, label, time_scale
from flopwright.report.metrics import Prediction, StepMetrics
from flopwright.spec.scenario import Scenario

_HEIGHT: Final = 400


def layout(figure: go.Figure, *, x: str, y: str, height: int = _HEIGHT, **more: Any) -> go.Figure:
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
        line={"color": LIMIT, "dash": "dash"},
        annotation={
            "text": f"capacity {capacity_bytes * factor:.4g} {unit}",
            "font": {"color": LIMIT},
        },
        annotation_position="top right",
    )
    figure.update_xaxes(type="category")
    return layout(figure, x="pipeline stage", y=f"memory ({unit})", barmode="stack")


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
        marker={"color": INK, "symbol": "line-ns-open", "size": 12},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [
                p.step_time_interval.high * factor - t for p, t in zip(found, times, strict=True)
            ],
            "arrayminus": [
                t - p.step_time_interval.low * factor for p, t in zip(found, times, strict=True)
            ],
            "color": INK,
        },
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return layout(
        figure,
        x=f"step time ({unit})",
        y="",
        barmode="stack",
        height=190 + max(42 * len(labels), 84),
        legend_traceorder="normal",
    )


def pareto_figure(result: SearchResult, scenario: Scenario, against: str = "memory") -> go.Figure:
    """Returns step time over peak memory or cost: the front, listed plans, those lacking memory.

    Args:
        against: "memory" of the fullest rank, or "cost" of a step.
    """
    capacity_bytes = scenario.cluster.node.gpu.hbm_bytes
    price = scenario.cluster.price_usd_per_gpu_h
    byte_factor, byte_unit = bytes_scale(capacity_bytes)
    cost_factor, cost_unit = (1.0, "GPU-hours") if price is None else (price, "USD")
    front = [(t.plan, t.step_time_s, (1 - t.headroom) * capacity_bytes) for t in result.front]
    ranked = [(r.plan, r.prediction.metrics.step_time_s, (1 - r.headroom) * capacity_bytes)
              for r in result.ranked]  # fmt: skip
    lacking = [(i.plan, i.step_time_s, i.peak_memory_bytes) for i in result.infeasible]
    slowest = max((row[1] for row in (*front, *ranked, *lacking)), default=0.0)
    time_factor, time_unit = time_scale(slowest)
    figure = go.Figure()
    for name, rows, colour, symbol in (
        ("no plan beats it in time, memory and cost", front, GREY, "circle-open"),
        ("listed above", ranked, BLUE, "circle"),
        ("lacks memory", lacking, RED, "x"),
    ):
        if not rows:
            continue
        memory = [row[2] * byte_factor for row in rows]
        cost = [row[1] * row[0].world_size / 3600 * cost_factor for row in rows]
        figure.add_scatter(
            x=memory if against == "memory" else cost,
            y=[row[1] * time_factor for row in rows],
            customdata=[
                [row[0].label(), held, 100 * (1 - row[2] / capacity_bytes), paid]
                for row, held, paid in zip(rows, memory, cost, strict=True)
            ],
            name=name,
            mode="markers",
            marker={"color": colour, "size": 10, "symbol": symbol},
            hovertemplate=f"%{{customdata[0]}}<br>%{{y:.4g}} {time_unit}, "
            f"%{{customdata[1]:.4g}} {byte_unit} (%{{customdata[2]:.3g}} % free), "
            f"%{{customdata[3]:.4g}} {cost_unit} a step<extra></extra>",
        )
    if against == "memory":
        figure.add_vline(
            x=capacity_bytes * byte_factor,
            line={"color": LIMIT, "dash": "dash"},
            annotation={"text": "capacity", "font": {"color": LIMIT}},
            annotation_position="top left",
        )
    x = f"peak memory of the fullest rank ({byte_unit})"
    x = x if against == "memory" else f"cost of a step ({cost_unit})"
    return layout(figure, x=x, y=f"step time ({time_unit})")


def scatter_figure(after: Sequence[Comparison], before: Sequence[Comparison] = ()) -> go.Figure:
    """Returns predicted over measured step times with bands of 10 and 20 percent."""
    pairs = {"public prior": (before, GREY), "this calibration": (after, RED)}
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
            fillcolor=BAND,
            name=f"±{band:.0%}",
            hoverinfo="skip",
        )  # fmt: skip
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": INK, "width": 1}, showlegend=False
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
    return layout(figure, x=f"measured step time ({unit})", y=f"predicted step time ({unit})")


def classes_figure(classes: Sequence[ClassComparison], *, kind: str) -> go.Figure:
    """Returns predicted and measured side by side for each class ("time" or "memory")."""
    largest = max((max(c.predicted, c.measured) for c in classes), default=0.0)
    factor, unit = (time_scale if kind == "time" else bytes_scale)(largest)
    names = [label(c.name) for c in classes]
    figure = go.Figure()
    figure.add_bar(
        x=names, y=[c.predicted * factor for c in classes], name="predicted", marker_color=RED
    )
    figure.add_bar(
        x=names, y=[c.measured * factor for c in classes], name="measured", marker_color=BLUE
    )
    title = "exposed time a step" if kind == "time" else "memory of the fullest stage"
    return layout(figure, x="", y=f"{title} ({unit})", barmode="group")


def sensitivity_figure(found: Sequence[Sensitivity]) -> go.Figure:
    """Returns the share of the step that each resource holds back, and what 10 % more gives."""
    names = [f"{s.role} ({s.name})" if s.name else s.role for s in found]
    figure = go.Figure()
    for title, values, colour in (
        ("goes without a limit", [100 * s.share for s in found], RED),
        ("goes with 10 % more", [100 * s.tenth for s in found], BLUE),
    ):
        figure.add_bar(y=names, x=values, name=title, marker_color=colour, orientation="h")
    figure.update_yaxes(autorange="reversed", automargin=True)
    return layout(figure, x="share of the step (%)", y="", barmode="group")


def scaling_figure(rows: Sequence[SweepRow]) -> go.Figure:
    """Returns tokens/s over GPUs beside what the smallest size would give in proportion."""
    found = [(r.gpus, r.tokens_per_s_per_gpu) for r in rows if r.gpus and r.tokens_per_s_per_gpu]
    figure = go.Figure()
    if found:
        gpus = [g for g, _ in found]
        first = found[0][1]
        figure.add_scatter(
            x=gpus, y=[g * t for g, t in found], mode="lines+markers", name="best plan",
            marker={"color": BLUE},
        )  # fmt: skip
        figure.add_scatter(
            x=gpus, y=[g * first for g in gpus], mode="lines", name="in proportion",
            line={"color": GREY, "dash": "dot"},
        )  # fmt: skip
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return layout(figure, x="GPUs", y="tokens/s")


def task_time_figure(seconds: Mapping[str, float]) -> go.Figure:
    """Returns how long a task takes at each effort level."""
    factor, unit = time_scale(max(seconds.values(), default=0.0))
    figure = go.Figure()
    figure.add_bar(x=list(seconds), y=[s * factor for s in seconds.values()], marker_color=BLUE)
    return layout(figure, x="effort", y=f"time of a task ({unit})", height=320)
