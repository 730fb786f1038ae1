"""Charts of one plan: its timeline, its memory through the step, what it sends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray

from flopwright.dashboards.figures import layout
from flopwright.dashboards.palette import BLUE, LIMIT, RED, TIME_COLOURS
from flopwright.planner.questions.neighbours import Neighbour
from flopwright.report.compare_style import bytes_scale, label, time_scale
from flopwright.report.metrics import StepMetrics
from flopwright.report.trace import Trace
from flopwright.simulator.engine.memory_timeline import RankMemory

Floats = NDArray[np.float64]
MAX_RANKS: Final = 64
_BESIDE: Final = frozenset({"pp_comm", "dp_comm", "offload"})
_STAGE_COLOURS: Final = "Viridis"
_GROUPS: Final = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert parallel",
    "etp": "expert tensor parallel",
    "pp": "pipeline",
    "dp": "data parallel",
    "edp": "experts' data parallel",
}


def timeline_figure(trace: Trace, step_time_s: float) -> go.Figure:
    """Returns the step as a Gantt chart, a row a rank: drag to zoom, double-click to reset."""
    factor, unit = time_scale(step_time_s)
    ranks = sorted({e.rank for e in trace})[:MAX_RANKS]
    row = {rank: i for i, rank in enumerate(ranks)}
    figure = go.Figure()
    for cls, colour in TIME_COLOURS.items():
        events = [e for e in trace if e.cls == cls and e.rank in row]
        if not events:
            continue
        start = np.array([e.start_s for e in events]) * factor
        end = np.array([e.end_s for e in events]) * factor
        low, high = (0.28, 0.42) if cls in _BESIDE else (-0.42, 0.24)
        of = np.array([row[e.rank] for e in events], float)
        x, y = _boxes(start, end, of + low, of + high)
        # One path a class: thousands of boxes stay quick. What is hovered are their middles.
        figure.add_scatter(
            x=x, y=y, mode="none", fill="toself", fillcolor=colour, name=label(cls),
            legendgroup=cls, hoverinfo="skip",
        )  # fmt: skip
        figure.add_scattergl(
            x=(start + end) / 2,
            y=of + (low + high) / 2,
            mode="markers",
            marker={"color": colour, "opacity": 0, "size": 9},
            legendgroup=cls,
            showlegend=False,
            customdata=np.stack([end - start, of], axis=1),
            text=[e.name for e in events],
            hovertemplate=f"%{{text}}: %{{customdata[0]:.4g}} {unit}<extra>{label(cls)}</extra>",
        )
    figure.update_yaxes(
        tickvals=list(range(len(ranks))),
        ticktext=[str(r) for r in ranks],
        range=[len(ranks) - 0.3, -0.7],
        fixedrange=True,
    )
    figure.update_xaxes(range=[0, step_time_s * factor])
    height = min(900, 170 + 30 * len(ranks))
    return layout(figure, x=f"time ({unit})", y="pipeline stage", height=height)


def _boxes(start: Floats, end: Floats, low: Floats, high: Floats) -> tuple[Floats, Floats]:
    """Returns the corners of boxes as one path, with gaps between them."""
    gap = np.full(len(start), np.nan)
    x = np.stack([start, end, end, start, start, gap], axis=1)
    y = np.stack([low, low, high, high, low, gap], axis=1)
    return x.ravel(), y.ravel()


def memory_timeline_figure(
    memory: Sequence[RankMemory], capacity_bytes: int, step_time_s: float
) -> go.Figure:
    """Returns what each stage's rank holds through the step, under the capacity line."""
    byte_factor, byte_unit = bytes_scale(capacity_bytes)
    time_factor, time_unit = time_scale(step_time_s)
    figure = go.Figure()
    shown = memory[:MAX_RANKS]
    colours = _colours(len(shown))
    for stage, colour in zip(shown, colours, strict=True):
        fixed = sum(stage.fixed_bytes.values())
        total = (np.asarray(stage.activations) + np.asarray(stage.temporaries) + fixed) * (
            byte_factor
        )
        figure.add_scatter(
            x=np.asarray(stage.times_s) * time_factor,
            y=total,
            mode="lines",
            line={"color": colour, "width": 1.5, "shape": "hv"},
            name=f"stage {stage.stage}",
            hovertemplate=f"%{{y:.4g}} {byte_unit} at %{{x:.5g}} {time_unit}",
        )
    figure.add_hline(
        y=capacity_bytes * byte_factor,
        line={"color": LIMIT, "dash": "dash"},
        annotation={"text": "capacity", "font": {"color": LIMIT}},
        annotation_position="top right",
    )
    return layout(figure, x=f"time ({time_unit})", y=f"memory ({byte_unit})", height=420)


def _colours(count: int) -> list[str]:
    from plotly.colors import sample_colorscale

    at = np.linspace(0.05, 0.9, max(count, 2))[:count]
    return [str(c) for c in sample_colorscale(_STAGE_COLOURS, list(at))]


def comm_figure(comm_bytes: Mapping[str, float]) -> go.Figure:
    """Returns what a rank of the busiest stage sends in a step, by group of ranks."""
    factor, unit = bytes_scale(max(comm_bytes.values(), default=0.0))
    names = sorted(comm_bytes, key=lambda g: -comm_bytes[g])
    figure = go.Figure()
    figure.add_bar(
        x=[_GROUPS.get(g, g) for g in names],
        y=[comm_bytes[g] * factor for g in names],
        marker_color=BLUE,
    )
    return layout(figure, x="group of ranks", y=f"sent in a step ({unit})", height=360)


def difference_figure(own: StepMetrics, other: StepMetrics) -> go.Figure:
    """Returns seconds of a step by class: of the plan, and of the edited one."""
    names = [c for c in TIME_COLOURS if own.time_s.get(c, 0.0) or other.time_s.get(c, 0.0)]
    factor, unit = time_scale(max(own.step_time_s, other.step_time_s))
    figure = go.Figure()
    for title, metrics, colour in (("this plan", own, RED), ("edited", other, BLUE)):
        figure.add_bar(
            x=[label(c) for c in names],
            y=[metrics.time_s.get(c, 0.0) * factor for c in names],
            name=title,
            marker_color=colour,
        )
    return layout(figure, x="", y=f"exposed time a step ({unit})", barmode="group", height=360)


def neighbours_figure(neighbours: Sequence[Neighbour]) -> go.Figure:
    """Returns by how much each legal plan one choice away is slower (below zero: faster)."""
    legal = [(n, n.behind) for n in neighbours if n.behind is not None]
    figure = go.Figure()
    for title, fits, colour in (("fits", True, BLUE), ("lacks memory", False, RED)):
        found = [(n, behind) for n, behind in legal if (n.missing_bytes == 0) is fits]
        if found:
            figure.add_bar(
                y=[n.change for n, _ in found],
                x=[100 * behind for _, behind in found],
                text=[n.text for n, _ in found],
                textposition="none",
                name=title,
                marker_color=colour,
                orientation="h",
                hovertemplate="%{y}: %{x:+.1f} %<br>%{text}<extra></extra>",
            )
    order = [n.change for n, _ in legal]
    figure.update_yaxes(categoryorder="array", categoryarray=order[::-1], automargin=True)
    height = 140 + 22 * len(legal)
    return layout(figure, x="slower than this plan (%)", y="", height=height, barmode="overlay")
