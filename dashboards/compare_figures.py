"""Charts of comparisons: errors by phase, ranks, runs over time, published runs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from flopwright.dashboards.figures import layout
from flopwright.dashboards.palette import BLUE, GREY, INK, LIMIT, RED
from flopwright.report.compare_report import ComparisonReport
from flopwright.report.compare_style import BANDS, time_scale
from flopwright.report.drift import place_of, plan_series
from flopwright.report.findings import RankRow
from flopwright.report.metrics import Measurement
from flopwright.simulator.accuracy.score import Scored


def phase_error_figure(report: ComparisonReport) -> go.Figure:
    """Returns the signed error of each run's step time, by phase of training."""
    figure = go.Figure()
    for title, colour, side in (("before", GREY, "before"), ("after", BLUE, "after")):
        pairs = [
            (run.phase, error, run.plan_name)
            for run in report.runs
            if (found := getattr(run, side)) is not None
            and (error := found.error("step_time_s")) is not None
        ]
        if pairs:
            figure.add_scatter(
                x=[p[0] for p in pairs],
                y=[100 * p[1] for p in pairs],
                text=[p[2] for p in pairs],
                mode="markers",
                marker={"color": colour, "size": 10},
                name=f"{title} calibration",
                hovertemplate="%{text}: %{y:+.1f} %",
            )
    figure.add_hline(y=0, line={"color": INK})
    for band in BANDS:
        for sign in (-1, 1):
            figure.add_hline(y=100 * sign * band, line={"color": INK, "dash": "dot", "width": 1})
    return layout(figure, x="", y="predicted over measured - 1 (%)")


def ranks_figure(ranks: Sequence[RankRow]) -> go.Figure:
    """Returns what each rank was busy with, compute and traffic, predicted and measured."""
    most = max(r.compute_measured_s + r.traffic_measured_s for r in ranks)
    factor, unit = time_scale(most)
    names = [f"rank {r.rank}" for r in ranks]
    figure = go.Figure()
    for title, values, colour in (
        ("compute, predicted", [r.compute_predicted_s for r in ranks], RED),
        ("compute, measured", [r.compute_measured_s for r in ranks], BLUE),
        ("traffic, predicted", [r.traffic_predicted_s for r in ranks], "#e8a5af"),
        ("traffic, measured", [r.traffic_measured_s for r in ranks], "#9cc3df"),
    ):
        figure.add_bar(x=names, y=[v * factor for v in values], name=title, marker_color=colour)
    return layout(figure, x="", y=f"busy time a step ({unit})", barmode="group")


def over_time_figure(steps: Sequence[Measurement]) -> go.Figure:
    """Returns the step time of each plan on each machine, run by run, with its p10 to p90."""
    figure = go.Figure()
    times = [m.metrics.step_time_s for m in steps]
    factor, unit = time_scale(max(times, default=0.0))
    series = plan_series(steps)
    places = {place_of(runs[-1].fingerprint) for runs in series}
    for runs in series:
        name = runs[-1].plan_name
        if len(places) > 1:
            name += f", {place_of(runs[-1].fingerprint)}"
        middle = [m.metrics.step_time_s * factor for m in runs]
        late = [m.step_time_p90_s * factor for m in runs]
        early = [m.step_time_p10_s * factor for m in runs]
        figure.add_scatter(
            x=[m.created for m in runs],
            y=middle,
            mode="lines+markers",
            name=name,
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [high - t for high, t in zip(late, middle, strict=True)],
                "arrayminus": [t - low for low, t in zip(early, middle, strict=True)],
                "thickness": 1,
            },
        )
    return layout(figure, x="when", y=f"step time ({unit})")


def published_figure(runs: Sequence[Scored]) -> go.Figure:
    """Returns how far off the step times of published runs are, with bands of 10 and 20 %."""
    figure = go.Figure()
    for gpu in sorted({r.labels["gpu"] for r in runs}):
        of = [r for r in runs if r.labels["gpu"] == gpu]
        figure.add_scatter(
            x=[r.measured for r in of],
            y=[100 * r.error for r in of],
            text=[r.id for r in of],
            mode="markers",
            name=gpu,
            hovertemplate="%{text}<br>measured %{x:.4g} s, off by %{y:+.1f} %",
        )
    for band in BANDS:
        for sign in (-1, 1):
            figure.add_hline(y=100 * sign * band, line={"color": LIMIT, "dash": "dot", "width": 1})
    figure.add_hline(y=0, line={"color": INK})
    figure.update_xaxes(type="log")
    return layout(
        figure, x="measured step time (s)", y="predicted over measured - 1 (%)", height=460
    )


def rounds_figure(rows: pd.DataFrame) -> go.Figure:
    """Returns the seconds of each rollout round and stage (tables.rounds_and_stages) over time."""
    figure = go.Figure()
    longest = 0.0
    series = [(c, part) for c in ("round (s)", "stage (s)") if c in rows for part in [rows[c]]]
    for _, values in series:
        longest = max(longest, float(values.max(skipna=True)))
    factor, unit = time_scale(longest)
    for column, values in series:
        kept = rows[values.notna()]
        for name, own in kept.groupby("name"):
            figure.add_scatter(
                x=own["when"], y=own[column] * factor, mode="markers",
                name=f"{name}, {column.removesuffix(' (s)')}",
            )  # fmt: skip
    return layout(figure, x="when", y=f"wall time ({unit})")
