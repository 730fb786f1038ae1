"""An accuracy report as rows of the table that measurements and sweeps share (store/frame.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from flopwright.simulator.accuracy.report import LABELS, AccuracyReport
from flopwright.simulator.accuracy.score import Scored
from flopwright.store.frame import Row, frame_of
from flopwright.store.frame_files import with_own_columns

if TYPE_CHECKING:
    import pandas as pd

# Columns that only this table has, behind the shared ones: a run's labels ("source" there is
# where a row comes from, here it is who published the run), and its peak of memory.
OWN: Final = tuple(f"run_{label}" for label in LABELS)
PEAK: Final = "peak_memory_bytes"


def accuracy_frame(report: AccuracyReport) -> pd.DataFrame:
    """Returns two rows a run, "published" and "predicted", and two a peak of memory.

    The interval stands in step_time_p10_s and step_time_p90_s of the predicted row; rows of
    memory have their definition in `plan_name` behind the run's id, and no step time.
    """
    steps = [(run, row) for run in report.runs for row in _step_rows(run)]
    peaks = [(run, row, peak) for run in report.memory for row, peak in _memory_rows(run)]
    frame = frame_of([row for _, row in steps] + [row for _, row, _ in peaks])
    runs = [run for run, _ in steps] + [run for run, *_ in peaks]
    own: dict[str, list[Any]] = {
        name: [run.labels.get(label, "") for run in runs]
        for name, label in zip(OWN, LABELS, strict=True)
    }
    own[PEAK] = [None] * len(steps) + [peak for *_, peak in peaks]
    found = with_own_columns(frame, behind=own)
    return found.astype({PEAK: "float64"} | dict.fromkeys(OWN, "object"))


def _about(run: Scored, source: str) -> Row:
    return {
        "kind": "step",
        "source": source,
        "id": run.id,
        "plan_name": run.id,
        "gpu": run.labels.get("gpu", ""),
        "calibration_id": run.labels.get("stack", "") if source == "predicted" else "",
    }


def _step_rows(run: Scored) -> Iterator[Row]:
    yield _about(run, "published") | {"step_time_s": run.measured}
    yield _about(run, "predicted") | {
        "step_time_s": run.predicted,
        "step_time_p10_s": run.low,
        "step_time_p90_s": run.high,
    }


def _memory_rows(run: Scored) -> Iterator[tuple[Row, float]]:
    name = f"{run.id}: {run.labels.get('definition', 'peak memory')}"
    for source, nbytes in (("published", run.measured), ("predicted", run.predicted)):
        yield _about(run, source) | {"plan_name": name}, nbytes
