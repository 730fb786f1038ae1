"""Charts of RL rounds: completions with the cut, phases, the sweep over lambda."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from flopwright.dashboards.figures import LINE, layout
from flopwright.report.compare_style import AFTER, BEFORE, HELD_OUT, label, time_scale
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.sweep import LambdaSweep

Curve = Sequence[tuple[float, float]]

_PHASE_COLOURS: Final = ("#1f5f8b", "#c9c9c9", "#d1495b", "#9a9a9a", "#f2b134")
_BEST: Final = "#3d7a3c"


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
        line={"color": LINE, "dash": "dash"},
        annotation={"text": "the round ends here", "font": {"color": LINE}},
        annotation_position="bottom right",
    )
    figure.update_yaxes(range=[0, 105])
    return layout(figure, x="generation time (s)", y="attempts complete (%)")


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
            line={"color": LINE, "dash": "dash"},
            annotation={"text": "goal", "font": {"color": LINE}},
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
