"""The one table (frame.py) with columns of its own beside it, and as a Parquet file and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwright.errors import InputError, Violation
from flopwright.store.frame import COLUMNS, frame_of

if TYPE_CHECKING:
    import pandas as pd


def with_own_columns(
    frame: pd.DataFrame,
    *,
    before: Mapping[str, Sequence[Any] | pd.Series] | None = None,
    behind: Mapping[str, Sequence[Any] | pd.Series] | None = None,
) -> pd.DataFrame:
    """Returns the table with columns that only it has, in front of the shared ones and behind.

    Raises:
        KeyError: a column that the table has already.
    """
    import pandas as pd

    before, behind = before or {}, behind or {}
    taken = [*(set(before) & set(behind)), *({*before, *behind} & set(COLUMNS))]
    if taken:
        raise KeyError(f"columns of the table already: {', '.join(sorted(taken))}")
    parts = [pd.DataFrame(dict(p), index=frame.index) for p in (before, behind)]
    return pd.concat([parts[0], frame, parts[1]], axis=1)


def parquet_bytes(frame: pd.DataFrame) -> bytes:
    """Returns the table as a Parquet file (pyarrow)."""
    out = BytesIO()
    frame.to_parquet(out, engine="pyarrow", index=False)
    return out.getvalue()


def read_table(path: Path) -> pd.DataFrame:
    """Returns a table from a Parquet file, with the columns of its own that it has.

    Sweeps, accuracy reports and exported stores are such files.

    Raises:
        InputError: no readable Parquet file, or shared columns are missing or of another type.
    """
    import pandas as pd

    try:
        found = pd.read_parquet(path, engine="pyarrow")
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        rule = f"not a readable Parquet file: {str(error).splitlines()[0]}"
        raise InputError(Violation(file=str(path), rule=rule)) from error
    blank = frame_of([])
    texts = [c for c in COLUMNS if blank[c].dtype == object and c in found.columns]
    found = found.astype(dict.fromkeys(texts, "object"))
    wrong = [c for c in COLUMNS if c not in found.columns or found[c].dtype != blank[c].dtype]
    if wrong:
        raise InputError(
            Violation(
                file=str(path),
                field=", ".join(wrong),
                rule="columns of the table are missing or of another type",
                nearest_fix="docs/store.md describes the table",
            )
        )
    return found
