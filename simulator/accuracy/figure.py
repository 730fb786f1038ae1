"""Predicted against measured step times as one picture, coloured by processor."""

from __future__ import annotations

import io
from typing import Any, Final

import numpy as np

from flopwright.errors import InputError, Violation
from flopwright.simulator.accuracy.report import AccuracyReport
from flopwright.simulator.accuracy.score import Scored, grouped

_COLOURS: Final = (
    "#1b6ca8", "#d1495b", "#2e8b57", "#e09f3e", "#7b5ea7", "#4a4e69", "#00798c", "#b56576",
    "#8d6a3f", "#6c757d",
)  # fmt: skip
# Errors beyond so many per cent stand at the edge, with their number.
_MOST: Final = 90.0
_MARKS: Final = {"dense": "o", "moe": "^"}


def accuracy_png(report: AccuracyReport) -> bytes:
    """Returns the picture as PNG bytes: the scatter, and the spread of errors by processor.

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
    runs = report.headline()
    if not runs:
        raise InputError("no run was predicted: there is nothing to draw")
    figure = Figure(figsize=(13.5, 6.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1.1, 1.0])
    by_gpu = dict(sorted(grouped(runs, lambda r: r.labels["gpu"]).items()))
    colours = {gpu: _COLOURS[i % len(_COLOURS)] for i, gpu in enumerate(by_gpu)}
    _scatter(left, runs, colours)
    _spread(right, by_gpu, colours)
    overall, cells = report.overall()
    figure.suptitle(
        f"{len(runs)} published runs: median error {overall.median_abs_error:.1%}, "
        f"9 of 10 within {overall.p90_abs_error:.1%}; over {cells.cells} cells "
        f"{cells.median_abs_error:.1%} and {cells.p90_abs_error:.1%} ({report.protocol})",
        fontsize=11, x=0.01, ha="left", fontweight="bold",
    )  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _scatter(axis: Any, runs: tuple[Scored, ...], colours: dict[str, str]) -> None:
    measured = np.array([r.measured for r in runs])
    ends = np.array([measured.min() / 1.5, measured.max() * 1.5])
    for band, shade in ((0.2, "#e9eef2"), (0.1, "#d4dfe8")):
        axis.fill_between(ends, ends * (1 - band), ends * (1 + band), color=shade, zorder=0)
    axis.plot(ends, ends, color="#555555", linewidth=1, zorder=1)
    for run in runs:
        axis.plot(
            run.measured, run.predicted, _MARKS[run.labels["family"]], markersize=4.5,
            color=colours[run.labels["gpu"]], alpha=0.6, mew=0, zorder=2,
        )  # fmt: skip
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(*ends)
    axis.set_ylim(*ends)
    axis.set_xlabel("measured step time (s)")
    axis.set_ylabel("predicted step time (s)")
    axis.set_title("circles: dense, triangles: experts; bands: 10 % and 20 %", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _spread(axis: Any, by_gpu: dict[str, list[Scored]], colours: dict[str, str]) -> None:
    """Each run's signed error in a row of its processor, the median as a bar."""
    for band, shade in ((0.2, "#e9eef2"), (0.1, "#d4dfe8")):
        axis.axvspan(-100 * band, 100 * band, color=shade, zorder=0)
    axis.axvline(0.0, color="#555555", linewidth=1, zorder=1)
    jitter = np.random.default_rng(0)
    for row, (gpu, runs) in enumerate(by_gpu.items()):
        errors = np.array([100 * r.error for r in runs])
        rows = row + jitter.uniform(-0.27, 0.27, len(runs))
        inside = errors <= _MOST
        axis.plot(
            errors[inside], rows[inside], "o", color=colours[gpu], markersize=4, alpha=0.55, mew=0
        )
        for error, height in zip(errors[~inside], rows[~inside], strict=True):
            axis.plot(_MOST, height, ">", color=colours[gpu], markersize=5, mew=0)
            axis.annotate(f"{error:+.0f} % ", (_MOST, height), ha="right", va="center", fontsize=8)
        middle = float(np.median(errors))
        axis.plot([middle, middle], [row - 0.36, row + 0.36], color="#111111", linewidth=2)
    axis.set_yticks(range(len(by_gpu)), [f"{g} ({len(r)})" for g, r in by_gpu.items()], fontsize=9)
    axis.set_ylim(len(by_gpu) - 0.4, -0.6)
    axis.set_xlim(-70, _MOST + 3)
    axis.set_xlabel("predicted / measured - 1 (%); bar: median")
    axis.set_title("error by processor (runs)", fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)
