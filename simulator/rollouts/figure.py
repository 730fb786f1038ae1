"""A round report as one picture: completion curve, lambda sweep, staleness, time by phase."""

from __future__ import annotations

import io
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.simulator.rollouts.record import PHASES, RoundRecord
from flopwright.simulator.rollouts.report import RoundReport
from flopwright.simulator.rollouts.sweep import LambdaSweep

BLUE: Final = "#1f5f8b"
LIGHT: Final = "#9bc4e2"
RED: Final = "#d1495b"
GREY: Final = "#9a9a9a"
PHASE_COLOURS: Final = {
    "generation": "#4a90c2",
    "switch_to_update": "#c9c9c9",
    "update": "#d1495b",
    "switch_to_generation": "#9a9a9a",
    "weight_sync": "#f2b134",
}


def new_figure(width: float, height: float) -> Any:
    """Returns an empty figure that draws without a screen.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError(
            Violation(rule=f"cannot draw: {error}", nearest_fix="pip install 'flopwright[plots]'")
        ) from error
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def png_bytes(figure: Any, title: str) -> bytes:
    """Returns a figure as PNG bytes, with a title and without the frames' upper right."""
    figure.suptitle(title, fontsize=12, x=0.01, ha="left", fontweight="bold")
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def round_png(
    report: RoundReport,
    sweep: LambdaSweep | None = None,
    record: RoundRecord | None = None,
    capacity_tokens: int | None = None,
) -> bytes:
    """Returns the picture as PNG bytes; the panels over lambda need a sweep.

    Args:
        record: a round with its log, whose use of the cache is drawn over time.
        capacity_tokens: of an instance; None: never short.

    Raises:
        InputError: matplotlib is not installed.
    """
    rows = 1 if sweep is None and record is None else 2
    figure = new_figure(15.0, 1.2 + 4.0 * rows)
    from flopwright.simulator.rollouts.figure_cache import draw_cache

    columns = 2 if sweep is None and record is not None else 3
    axes = figure.subplots(rows, columns, squeeze=False)
    if sweep is None and record is not None:
        draw_completions(axes[0][0], report, None)
        draw_cache(axes[0][1], record, capacity_tokens)
        draw_staleness(axes[1][0], report)
        draw_phases(axes[1][1], report)
        return png_bytes(figure, _title(report))
    draw_completions(axes[0][0], report, sweep)
    draw_staleness(axes[0][1], report)
    if sweep is None:
        draw_phases(axes[0][2], report)
    else:
        _phases_over_lambda(axes[0][2], sweep)
        _throughput(axes[1][0], sweep)
        _mean_staleness(axes[1][1], sweep)
        _trade(axes[1][2], sweep)
    return png_bytes(figure, _title(report))


def _title(report: RoundReport) -> str:
    return (
        f"{report.scenario}: {report.attempts_in_flight:,} attempts in flight, "
        f"a round ends at {report.stop_count:,} (lambda {report.stop_fraction:g})"
    )


def head(axis: Any, title: str, x: str, y: str) -> None:
    """Gives a panel its title and the names of its axes."""
    axis.set_title(title, loc="left", fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.25)


def draw_completions(axis: Any, report: RoundReport, sweep: LambdaSweep | None) -> None:
    """Draws completions over time; the cut at lambda, and the tail that it avoids."""
    whole = sweep.synchronous if sweep is not None else None
    if whole is not None and whole.stop_fraction > report.stop_fraction:
        seconds, share = zip(*whole.completion_curve, strict=True)
        name = f"lambda {whole.stop_fraction:g}: {seconds[-1]:,.0f} s"
        axis.plot(seconds, share, color=GREY, linewidth=1.8, label=name)
        axis.axvspan(report.completion_curve[-1][0], seconds[-1], color=GREY, alpha=0.10, lw=0)
    seconds, share = zip(*report.completion_curve, strict=True)
    name = f"lambda {report.stop_fraction:g}: {seconds[-1]:,.0f} s"
    axis.plot(seconds, share, color=BLUE, linewidth=2.2, label=name)
    axis.axhline(report.stop_fraction, color=RED, linewidth=1, linestyle="--")
    axis.plot([seconds[-1]], [share[-1]], "o", color=RED, markersize=6)
    if report.stop_fraction < 1:
        axis.annotate(
            f"cut: {1 - share[-1]:.0%} parked",
            (seconds[-1], share[-1]),
            xytext=(-8, 8),
            textcoords="offset points",
            ha="right",
            color=RED,
            fontsize=9,
        )
    axis.set_xlim(left=0)
    axis.set_ylim(0, 1.03)
    axis.legend(loc="lower right", frameon=False, fontsize=9)
    head(axis, "completions in one round", "s since generation began", "share complete")


def draw_staleness(axis: Any, report: RoundReport) -> None:
    """Draws how many versions behind attempts are, at completion and when trained on."""
    parts = (
        ("at completion", report.steady.staleness, BLUE, report.mean_staleness),
        ("when trained on", report.trained_staleness, LIGHT, report.mean_trained_staleness),
    )
    last = max(max(h, default=0) for _, h, _, _ in parts)
    shown = min(last, 12)
    for shift, (name, histogram, colour, mean) in zip((-0.2, 0.2), parts, strict=True):
        total = max(1, sum(histogram.values()))
        share = [histogram.get(k, 0) / total for k in range(shown + 1)]
        share[-1] += sum(n for k, n in histogram.items() if k > shown) / total
        bars = axis.bar(
            [k + shift for k in range(shown + 1)],
            share,
            width=0.4,
            color=colour,
            label=f"{name}: mean {mean:.2f}",
        )
        if shown <= 5:
            axis.bar_label(bars, [f"{s:.1%}" if s else "" for s in share], fontsize=8, padding=1)
    ticks = [str(k) for k in range(shown + 1)]
    ticks[-1] += "+" if last > shown else ""
    axis.set_xticks(range(shown + 1), ticks)
    axis.legend(frameon=False, fontsize=9)
    head(axis, "staleness", "policy versions behind", "share of attempts")
    axis.grid(visible=False, axis="x")


def draw_phases(axis: Any, report: RoundReport) -> None:
    """Draws seconds by phase of the mean round, the first phase on top."""
    phases = list(report.steady.time_s)
    names = [phase.replace("_", " ") for phase in phases]
    seconds = [report.steady.time_s[phase] for phase in phases]
    bars = axis.barh(names, seconds, color=[PHASE_COLOURS.get(p, LIGHT) for p in phases])
    whole = report.steady.round_time_s or 1.0
    axis.bar_label(bars, [f"{s:,.3g} s, {s / whole:.0%}" for s in seconds], fontsize=9, padding=3)
    axis.invert_yaxis()
    axis.margins(x=0.25)
    head(axis, f"time by phase, mean round of {whole:,.3g} s", "s", "")
    axis.grid(visible=False, axis="y")


def _phases_over_lambda(axis: Any, sweep: LambdaSweep) -> None:
    """Draws seconds by phase of the mean round, a bar a lambda."""
    names = [f"{p.stop_fraction:g}" for p in sweep.points]
    bottom = [0.0] * len(names)
    for phase in PHASES:
        seconds = [p.steady.time_s[phase] for p in sweep.points]
        if any(seconds):
            name, colour = phase.replace("_", " "), PHASE_COLOURS[phase]
            axis.bar(names, seconds, bottom=bottom, width=0.75, color=colour, label=name)
        bottom = [b + s for b, s in zip(bottom, seconds, strict=True)]
    axis.tick_params(axis="x", labelsize=8)
    axis.legend(frameon=False, fontsize=9, loc="upper left")
    axis.set_ylim(0, max(bottom) * 1.25)
    head(axis, "time by phase, mean round", "lambda", "s")
    axis.grid(visible=False, axis="x")


def _throughput(axis: Any, sweep: LambdaSweep) -> None:
    x = [p.stop_fraction for p in sweep.points]
    rate = [p.attempts_per_s for p in sweep.points]
    error = [p.attempts_per_s_error for p in sweep.points]
    axis.errorbar(
        x, rate, yerr=error, color=BLUE, marker="o", markersize=4, linewidth=2, capsize=2
    )
    _shade_refused(axis, sweep)
    _mark(axis, sweep, [p.attempts_per_s for p in sweep.points])
    axis.set_ylim(bottom=0)
    axis.margins(y=0.15)
    head(axis, "throughput of the whole iteration", "lambda", "attempts/s")


def _mean_staleness(axis: Any, sweep: LambdaSweep) -> None:
    x = [p.stop_fraction for p in sweep.points]
    at_end = [p.mean_staleness for p in sweep.points]
    axis.plot(x, at_end, color=BLUE, marker="o", markersize=4, linewidth=2, label="at completion")
    axis.plot(
        x,
        [p.mean_trained_staleness for p in sweep.points],
        color=LIGHT,
        marker="o",
        markersize=4,
        linewidth=2,
        label="when trained on",
    )
    axis.plot(
        x, [1 / f - 1 for f in x], color="black", linewidth=1, linestyle=":", label="1/lambda - 1"
    )
    if sweep.max_mean_staleness is not None:
        axis.axhline(sweep.max_mean_staleness, color=RED, linewidth=1, linestyle="--")
        axis.annotate(
            f"bound {sweep.max_mean_staleness:g}",
            (x[0], sweep.max_mean_staleness),
            xytext=(0, 4),
            textcoords="offset points",
            color=RED,
            fontsize=9,
        )
    _shade_refused(axis, sweep)
    axis.set_ylim(bottom=0)
    axis.legend(frameon=False, fontsize=9, loc="upper right")
    head(axis, "mean staleness", "lambda", "policy versions behind")


def _trade(axis: Any, sweep: LambdaSweep) -> None:
    """Draws throughput against stale tokens: what is bought and what it is paid with."""
    x = [p.off_policy_share for p in sweep.points]
    base = sweep.synchronous.attempts_per_s
    y = [p.attempts_per_s / base for p in sweep.points]
    axis.plot(x, y, color=BLUE, marker="o", markersize=4, linewidth=1.5)
    for i, p in enumerate(sweep.points):
        axis.annotate(
            f"{p.stop_fraction:g}",
            (x[i], y[i]),
            xytext=(5, -9),
            textcoords="offset points",
            fontsize=8,
            color=RED if i == sweep.best else "black",
        )
    axis.plot([x[sweep.best]], [y[sweep.best]], "o", color=RED, markersize=8)
    axis.xaxis.set_major_formatter(lambda v, _: f"{v:.0%}")
    axis.yaxis.set_major_formatter(lambda v, _: f"{v:.1f}x")
    axis.margins(0.08)
    title = f"what it trades (points are lambda; 1x = lambda {sweep.synchronous.stop_fraction:g})"
    head(axis, title, "tokens from older policy versions", "attempts/s")


def _shade_refused(axis: Any, sweep: LambdaSweep) -> None:
    """Shades the lambdas whose staleness passes the bound."""
    bound = sweep.max_mean_staleness
    if bound is None:
        return
    refused = [p.stop_fraction for p in sweep.points if p.mean_staleness > bound]
    allowed = [p.stop_fraction for p in sweep.points if p.mean_staleness <= bound]
    if refused and allowed and max(refused) < min(allowed):
        edge = (max(refused) + min(allowed)) / 2
        axis.axvspan(min(refused) - 0.02, edge, color=RED, alpha=0.07, lw=0, label="_")


def _mark(axis: Any, sweep: LambdaSweep, values: list[float]) -> None:
    best = sweep.best_point
    axis.plot([best.stop_fraction], [values[sweep.best]], "o", color=RED, markersize=8)
    axis.annotate(
        f"best: {best.stop_fraction:g}",
        (best.stop_fraction, values[sweep.best]),
        xytext=(7, 6),
        textcoords="offset points",
        color=RED,
        fontsize=9,
    )
