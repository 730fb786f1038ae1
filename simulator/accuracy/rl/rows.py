"""The CSV of measured RL rows: one metric a row."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.simulator.accuracy.rl.values import Value, parse_value

COLUMNS: Final = ("id", "source", "system", "model", "metric", "value", "unit")
_LARGEST_BYTES: Final = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row; `values` is empty where the cell is in words."""

    id: str
    system: str
    model: str
    metric: str
    text: str
    unit: str
    values: tuple[Value, ...]
    line: int


def read_rows(path: Path) -> dict[str, Row]:
    """Returns the rows of a file by id.

    Raises:
        InputError: unreadable, a column is missing, an id stands twice or is empty: all at
            once.
    """
    file = str(path)
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise InputError(Violation(file=file, rule="larger than 64 MiB: no such table"))
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "not UTF-8 text"
        raise InputError(Violation(file=file, rule=f"cannot be read: {what}")) from error
    try:
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        missing = [c for c in COLUMNS if c not in (reader.fieldnames or ())]
        if missing:
            raise InputError(
                [Violation(file=file, line=1, field=c, rule="a column is missing",
                           nearest_fix=f"the first line names columns; add {c}") for c in missing]
            )  # fmt: skip
        return _rows(reader, file)
    except csv.Error as error:
        raise InputError(Violation(file=file, rule=f"is not a CSV file: {error}")) from error


def _rows(reader: csv.DictReader[str], file: str) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    found: list[Violation] = []
    for cells in reader:
        line, name = reader.line_num, (cells["id"] or "").strip()
        if None in cells or None in cells.values():
            found.append(Violation(file=file, line=line, value=name, rule="wrong number of cells"))
            continue
        if not name or name in rows:
            rule = "stands twice" if name else "is empty"
            found.append(Violation(file=file, line=line, field="id", value=name, rule=rule))
            continue
        value, unit = cells["value"], cells["unit"]
        rows[name] = Row(
            id=name,
            system=cells["system"],
            model=cells["model"],
            metric=cells["metric"],
            text=value,
            unit=unit,
            values=parse_value(value, unit),
            line=line,
        )
    if found:
        raise InputError(found)
    if not rows:
        raise InputError(Violation(file=file, rule="holds no rows"))
    return rows
