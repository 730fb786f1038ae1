"""Charts of RL rounds: completions with the cut, phases, the sweep over lambda."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flopwright.dashboards.figures import layout
from flopwright.dashboards.palette import (
    BAND,
    BLUE,
    GREEN,
    GREY,
    LIMIT,
    PURPLE,
    RED,
    YELLOW,
)
from flopwright.planner.rollouts.result import LoopResult, RankedLoop
from flopwright.report.compare_style import bytes_scale, label, time_scale
from flopwright.simulator.rollouts.lengths import survival
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.sweep import LambdaSweep
from flopwright.spec.rollout import LengthSpec

Curve = Sequence[tuple[float, float]]

_PHASE_COLOURS: Final = (BLUE, "#c9c9c9", RED, GREY, YELLOW)
_LAYOUTS: Final = {
    "colocated": BLUE,
    "disaggregated": YELLOW,
    "one_step_off": GREEN,
    "async": PURPLE,
}


def completion_figure(curve: Curve, stop_fraction: float, whole: Curve) -> go.Figure:
    """Returns the share of attempts complete over time, where lambda cuts, and without a cut."""
    figure = go.Figure()
    for name, points, colour, dash in (
        ("every attempt waited for (lambda = 1)", whole, GREY, "dot"),
        (f"lambda = {stop_fraction:g}", curve, BLUE, "solid"),
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
        line={"color": LIMIT, "dash": "dash"},
        annotation={"text": "the round ends here", "font": {"color": LIMIT}},
        annotation_position="bottom right",
    )
    figure.update_yaxes(range=[0, 105])
    return layout(figure, x="generation time (s)", y="attempts complete (%)")


def sweep_figure(sweep: LambdaSweep) -> go.Figure:
    """Returns throughput, idle share, staleness and KV use over lambda, side by side."""
    points = sweep.points
    fractions = [p.stop_fraction for p in points]
    factor, unit = bytes_scale(max((p.kv_peak_bytes for p in points), default=0))
    panels = (
        ("attempts/s", [p.attempts_per_s for p in points], BLUE),
        ("idle slots (%)", [100 * p.steady.gpu_idle_share for p in points], GREY),
        ("policy versions behind", [p.mean_staleness for p in points], RED),
        (f"KV peak ({unit})", [p.kv_peak_bytes * factor for p in points], PURPLE),
    )
    titles = [title for title, _, _ in panels]
    figure = make_subplots(rows=2, cols=2, subplot_titles=titles, vertical_spacing=0.16)
    best = points[sweep.best].stop_fraction
    for i, (title, values, colour) in enumerate(panels):
        row, col = i // 2 + 1, i % 2 + 1
        figure.add_scatter(
            x=fractions, y=values, mode="lines+markers", name=title,
            line={"color": colour}, showlegend=False, row=row, col=col,
        )  # fmt: skip
        figure.add_vline(x=best, line={"color": GREEN, "dash": "dot"}, row=row, col=col)
        figure.update_xaxes(title_text="lambda" if row == 2 else "", row=row, col=col)
    if sweep.max_mean_staleness is not None:
        figure.add_hline(
            y=sweep.max_mean_staleness, row=2, col=1, line={"color": LIMIT, "dash": "dash"},
            annotation={"text": "goal", "font": {"color": LIMIT}},
            annotation_position="top left",
        )  # fmt: skip
    figure.update_layout(height=560, margin={"l": 10, "r": 20, "t": 60, "b": 10})
    return figure


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
    return layout(
        figure, x=f"time of a round ({unit})", y="", barmode="stack", legend_traceorder="normal"
    )


def lengths_figure(lengths: LengthSpec) -> go.Figure:
    """Returns the share of completions that are longer than so many tokens."""
    longer = survival(lengths)
    top = 1.0
    while float(longer(np.array([top]))[0]) > 1e-4 and top < 1e9:
        top *= 1.25
    x = np.linspace(0, top, 400)
    figure = go.Figure()
    figure.add_scatter(
        x=x,
        y=100 * longer(x),
        mode="lines",
        line={"color": BLUE},
        fill="tozeroy",
        fillcolor=BAND,
        hovertemplate="%{y:.3g} % are longer than %{x:,.0f} tokens<extra></extra>",
    )
    return layout(figure, x="tokens", y="completions that are longer (%)")


def staleness_figure(histogram: Mapping[int, int]) -> go.Figure:
    """Returns the share of attempts by versions behind when they were trained on."""
    total = sum(histogram.values()) or 1
    versions = sorted(histogram)
    figure = go.Figure()
    figure.add_bar(
        x=[str(v) for v in versions],
        y=[100 * histogram[v] / total for v in versions],
        marker_color=RED,
    )
    figure.update_xaxes(type="category")
    return layout(figure, x="policy versions behind", y="attempts trained on (%)")


def front_figure(result: LoopResult) -> go.Figure:
    """Returns throughput over staleness by layout; the line joins what nothing beats."""
    figure = go.Figure()
    front = result.front
    figure.add_scatter(
        x=[r.outcome.mean_staleness for r in front],
        y=[r.outcome.attempts_per_s for r in front],
        mode="lines",
        line={"shape": "hv", "color": GREY},
        name="nothing is both fresher and faster",
    )
    seen: dict[str, RankedLoop] = {r.words: r for r in (*result.ranked, *front)}
    for name, colour in _LAYOUTS.items():
        found = [r for r in seen.values() if r.plan.layout == name]
        if found:
            figure.add_scatter(
                x=[r.outcome.mean_staleness for r in found],
                y=[r.outcome.attempts_per_s for r in found],
                text=[r.words for r in found],
                mode="markers",
                marker={"color": colour, "size": 11},
                name=name.replace("_", "-"),
                hovertemplate="%{text}<br>%{y:.4g} attempts/s, %{x:.2f} versions behind",
            )
    figure.update_yaxes(rangemode="tozero")
    return layout(figure, x="mean policy versions behind", y="attempts/s")


def binds_figure(binds: Mapping[str, float]) -> go.Figure:
    """Returns by how much faster the best loop would be without each thing."""
    figure = go.Figure()
    figure.add_bar(
        y=list(binds), x=[100 * g for g in binds.values()], orientation="h", marker_color=RED
    )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return layout(figure, x="more attempts/s without it (%)", y="")


def loops_figure(result: LoopResult) -> go.Figure:
    """Returns seconds by phase for 1,000 completed attempts, one bar a loop."""
    loops = result.ranked
    phases = list(dict.fromkeys(p for r in loops for p in r.outcome.iteration.time_s))
    figure = go.Figure()
    for phase, colour in zip(phases, (*_PHASE_COLOURS, PURPLE, GREEN), strict=False):
        figure.add_bar(
            y=[r.words for r in loops],
            x=[_per_thousand(r, phase) for r in loops],
            name=label(phase),
            marker_color=colour,
            orientation="h",
        )
    figure.update_yaxes(autorange="reversed", automargin=True)
    return layout(
        figure,
        x="s for 1,000 completed attempts",
        y="",
        barmode="stack",
        height=160 + 42 * len(loops),
        legend_traceorder="normal",
    )


def _per_thousand(ranked: RankedLoop, phase: str) -> float:
    out = ranked.outcome
    done = out.attempts_per_s * out.iteration.round_time_s
    return 1000 * out.iteration.time_s.get(phase, 0.0) / done if done else 0.0
