"""The comparison as one picture: step time, time by class, memory by class."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flopwright.errors import InputError, Violation
from flopwright.report.compare import ClassComparison
from flopwright.report.compare_report import ComparedRun, ComparisonReport
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
from flopwright.units import plural, show_seconds


def comparison_png(report: ComparisonReport) -> bytes:
    """Returns the picture as PNG bytes.

    Raises:
        InputError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise InputError(
            Violation(rule=f"cannot draw: {error}", nearest_fix="pip install 'flopwright[plots]'")
        ) from error
    if not report.runs:
        raise InputError("there is no measurement to draw")
    width = 15.0 + 1.1 * max(0, len(report.runs) - 4)
    figure = Figure(figsize=(width, 5.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3, width_ratios=[1.15, 1.2, 1.0])
    _step_time(axes[0], report)
    _stacks(axes[1], report.runs, _time_of, TIME_COLOURS, time_scale, "exposed time of a step")
    _stacks(
        axes[2],
        report.runs,
        _memory_of,
        MEMORY_COLOURS,
        bytes_scale,
        "tensors of the fullest stage",
    )
    figure.suptitle(_title(report), fontsize=12, x=0.01, ha="left", fontweight="bold")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _title(report: ComparisonReport) -> str:
    assert report.after is not None
    parts = [f"predicted and measured, {plural(report.after.runs, 'run')}"]
    if report.before is not None:
        parts.append(f"median step-time error {report.before.median_error:.1%} before")
        parts.append(f"{report.after.median_error:.1%} after calibration")
    else:
        parts.append(f"median step-time error {report.after.median_error:.1%}")
    if report.held_out is not None and report.fitted is not None:
        parts.append(f"{report.held_out.median_error:.1%} on runs not learnt from")
    if report.noise_floor is not None:
        parts.append(f"noise floor {report.noise_floor:.1%}")
    return "; ".join(parts)


def _step_time(axis: Any, report: ComparisonReport) -> None:
    """Measured over predicted of each run, with the interval and bands of 10 and 20 %."""
    for band in BANDS:
        axis.axvspan(1 - band, 1 + band, color="#e9eef2" if band > 0.1 else "#d4dfe8", zorder=0)
    axis.axvline(1.0, color="#555555", linewidth=1, zorder=1)
    lows, highs = [0.75], [1.25]
    for row, run in enumerate(report.runs):
        comparison = run.after
        step = comparison.metrics[0]
        ratio = step.predicted / step.measured
        interval = comparison.interval
        low, high = interval.low / step.measured, interval.high / step.measured
        colour = HELD_OUT if run.held_out else AFTER
        axis.plot([low, high], [row, row], color=colour, linewidth=2, alpha=0.45, zorder=2)
        axis.plot(ratio, row, "o", color=colour, markersize=9, zorder=4)
        axis.annotate(
            f"{ratio - 1:+.1%}", (ratio, row), (0, 9), textcoords="offset points",
            ha="center", fontsize=9, color=colour,
        )  # fmt: skip
        lows.append(low)
        highs.append(high)
        if comparison.split is not None:
            replayed = comparison.split.replayed_s / step.measured
            axis.plot(replayed, row, "d", color="#333333", markersize=6, zorder=5)
        if run.before is not None:
            before = run.before.metrics[0]
            was = before.predicted / before.measured
            axis.plot(was, row, "o", mfc="white", mec=BEFORE, mew=1.6, markersize=8, zorder=3)
            lows.append(was)
            highs.append(was)
    _step_axes(axis, report, min(lows), max(highs))


def _step_axes(axis: Any, report: ComparisonReport, low: float, high: float) -> None:
    from matplotlib.lines import Line2D

    axis.set_yticks(range(len(report.runs)), [_run_label(r) for r in report.runs], fontsize=9)
    axis.set_ylim(len(report.runs) - 0.4, -0.7)
    axis.set_xscale("log")
    axis.set_xlim(low * 0.94, high * 1.06)
    wide = high / low > 2.5  # 1.1 and 1.2 would touch 1
    ticks = [
        t
        for t in _RATIO_TICKS
        if low * 0.94 <= t <= high * 1.06 and not (wide and t in {0.9, 1.1, 1.2})
    ]
    axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("predicted / measured step time (bands: 10 % and 20 %)")
    axis.set_title("step time", fontsize=11)
    dots = [
        Line2D([], [], ls="", marker="o", color=AFTER, label="prediction, run learnt from"),
        Line2D([], [], ls="", marker="o", color=HELD_OUT, label="prediction, run not learnt from"),
        Line2D([], [], color="#777777", lw=2, label=_interval_label(report)),
    ]
    if report.before is not None:
        dots.append(
            Line2D([], [], ls="", marker="o", mfc="white", mec=BEFORE, label="before calibration")
        )
    else:
        dots = [Line2D([], [], ls="", marker="o", color=HELD_OUT, label="prediction"), *dots[2:]]
    if any(r.after.split is not None for r in report.runs):
        text = "the run's own durations, replayed"
        dots.append(Line2D([], [], ls="", marker="d", color="#333333", label=text))
    axis.legend(handles=dots, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    axis.spines[["top", "right"]].set_visible(False)


_RATIO_TICKS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10, 20)


def _interval_label(report: ComparisonReport) -> str:
    return f"{report.runs[0].after.interval.probability:.0%} interval"


def _run_label(run: ComparedRun) -> str:
    return f"{run.plan_name}\nmeasured {show_seconds(run.after.metrics[0].measured)}"


def _time_of(run: ComparedRun) -> Sequence[ClassComparison]:
    return run.after.time_classes


def _memory_of(run: ComparedRun) -> Sequence[ClassComparison]:
    return run.after.memory_classes


def _stacks(
    axis: Any,
    runs: Sequence[ComparedRun],
    classes_of: Callable[[ComparedRun], Sequence[ClassComparison]],
    colours: Mapping[str, str],
    scale_of: Callable[[float], tuple[float, str]],
    title: str,
) -> None:
    """Two stacks a run, predicted left (hatched) and measured right, coloured by class."""
    totals = [sum(getattr(c, side) for c in classes_of(r)) for r in runs for side in _SIDES]
    factor, unit = scale_of(max(totals, default=0.0))
    seen: dict[str, str] = {}
    for column, run in enumerate(runs):
        for side, shift in zip(_SIDES, (-0.2, 0.2), strict=True):
            base = 0.0
            for item in classes_of(run):
                height = getattr(item, side) * factor
                colour = colours.get(item.name, "#777777")
                seen[item.name] = colour
                axis.bar(
                    column + shift, height, 0.36, bottom=base, color=colour, edgecolor="white",
                    linewidth=0.6, hatch="///" if side == "predicted" else None,
                )  # fmt: skip
                base += height
            axis.text(column + shift, base, _number(base), ha="center", va="bottom", fontsize=8)
    names = [textwrap.fill(r.plan_name.replace("_", "_ "), 11).replace("_ ", "_") for r in runs]
    axis.set_xticks(range(len(runs)), names, fontsize=9 if len(runs) < 5 else 8)
    axis.set_ylabel(f"{title} ({unit})")
    axis.set_title("predicted (left, hatched) and measured (right)", fontsize=11)
    axis.set_ylim(0, 1.1 * max(totals, default=1.0) * factor)
    axis.spines[["top", "right"]].set_visible(False)
    _stack_legend(axis, seen)


def _number(value: float) -> str:
    """Returns three digits, never in powers of ten: 0.123, 12.3, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_SIDES = ("predicted", "measured")


def _stack_legend(axis: Any, seen: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=label(name)) for name, colour in seen.items()]
    if handles:
        axis.legend(
            handles=handles, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=4
        )
