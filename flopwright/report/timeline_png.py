"""A trace as one picture: a row a rank, coloured by time class."""

from __future__ import annotations

import io
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.report.compare_style import TIME_COLOURS, label, time_scale
from flopwright.report.trace import Trace, TraceEvent

MAX_RANKS: Final = 64
# Compute fills a rank's row; what runs beside it stands on a thinner line below.
_BESIDE: Final = frozenset({"pp_comm", "dp_comm", "offload"})


def timeline_png(trace: Trace, step_time_s: float, title: str) -> bytes:
    """Returns the picture as PNG bytes.

    Raises:
        InputError: matplotlib is not installed, or there is nothing to draw.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise InputError(
            Violation(rule=f"cannot draw: {error}", nearest_fix="pip install 'flopwright[plots]'")
        ) from error
    ranks = sorted({e.rank for e in trace})[:MAX_RANKS]
    if not ranks:
        raise InputError("there is nothing in the step to draw")
    factor, unit = time_scale(step_time_s)
    rows = {rank: i for i, rank in enumerate(ranks)}
    figure = Figure(figsize=(14, 1.6 + 0.32 * len(ranks)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    classes = [c for c in TIME_COLOURS if any(e.cls == c for e in trace)]
    for cls in classes:
        boxes = [_box(e, rows[e.rank], factor) for e in trace if e.cls == cls and e.rank in rows]
        axes.add_collection(PolyCollection(boxes, facecolors=TIME_COLOURS[cls], edgecolors="none"))
    axes.set_xlim(0, step_time_s * factor)
    axes.set_ylim(len(ranks) - 0.4, -0.6)
    axes.set_yticks(range(len(ranks)), [str(r) for r in ranks])
    axes.set_xlabel(f"time ({unit})")
    axes.set_ylabel("rank")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.legend(
        handles=[Patch(color=TIME_COLOURS[c], label=label(c)) for c in classes],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08 - 0.6 / len(ranks)),
        ncols=len(classes),
        frameon=False,
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _box(event: TraceEvent, row: int, factor: float) -> list[tuple[float, float]]:
    left, right = event.start_s * factor, event.end_s * factor
    top, bottom = (row + 0.3, row + 0.42) if event.cls in _BESIDE else (row - 0.4, row + 0.28)
    return [(left, top), (right, top), (right, bottom), (left, bottom)]
