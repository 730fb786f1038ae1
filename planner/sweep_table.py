"""A sweep as rows of the table that measurements and comparisons share (store/frame.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

from flopwright.planner.sweep import SweepRow, as_columns, check_installed
from flopwright.store.frame import COLUMNS, Row, frame_of, prediction_row
from flopwright.store.frame_files import parquet_bytes, with_own_columns

if TYPE_CHECKING:
    import pandas as pd


def sweep_frame(rows: Iterable[SweepRow]) -> pd.DataFrame:
    """Returns a row a point in the grid's order: swept fields, the shared table, the results."""
    import pandas as pd

    ordered = sorted(rows, key=lambda row: row.index)
    columns = as_columns(ordered)
    swept = {n: v for n, v in columns.items() if n not in SweepRow.model_fields}
    names = [n for n in columns if n in SweepRow.model_fields and n not in COLUMNS]
    # A column without any value has its type too: the files of two sweeps go together.
    found = pd.DataFrame({n: columns[n] for n in names}).astype({n: _dtype(n) for n in names})
    results = {name: found[name] for name in names}
    return with_own_columns(frame_of(map(_shared, ordered)), before=swept, behind=results)


def _shared(row: SweepRow) -> Row:
    """Returns a point's values of the shared columns; one without a plan has its place alone."""
    about: dict[str, Any] = {"kind": "step", "source": "swept", "index": row.index}
    if row.prediction is None:
        return about
    return prediction_row(row.prediction, "swept") | about | {
        "id": f"{row.scenario_hash}:{row.prediction.calibration_id or ''}",
        "plan_name": row.prediction.plan_name,
        "plan": row.plan or "",
        "phase": row.phase,
        "model_hash": row.model_hash,
        "scenario_hash": row.scenario_hash,
        "gpu": row.gpu,
        "world_size": row.gpus or 0,
    }  # fmt: skip


def _dtype(name: str) -> str:
    """Returns pandas' type of a result's column, one that knows of missing values."""
    annotation = SweepRow.model_fields[name].annotation
    kinds = get_args(annotation) or (annotation,)
    return "Int64" if int in kinds else "Float64" if float in kinds else "string"


def sweep_parquet(rows: Iterable[SweepRow]) -> bytes:
    """Returns the table as a Parquet file.

    Raises:
        InputError: pyarrow is not installed.
    """
    check_installed("pyarrow")
    return parquet_bytes(sweep_frame(rows))
