"""The store as a Parquet file and back: everything in it, nothing lost.

A row a measurement or record, with the columns of `store.frame` for whoever reads the file with
something else, and three of its own: `record` (the whole as JSON), `record_kind`, and `trace`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import TypeAdapter, ValidationError

from flopwright.errors import InputError, Violation
from flopwright.report.metrics import Measurement
from flopwright.report.records import AnyRecord, Record
from flopwright.store.frame import frame_of, measurements_frame
from flopwright.store.traces import packed, unpacked

if TYPE_CHECKING:
    from flopwright.store.database import Store

_MEASUREMENT: Final = "measurement"
_OWN: Final = ("record_kind", "record", "trace")


def export_parquet(store: Store, path: Path) -> int:
    """Writes all that a store holds; returns how many measurements and records.

    Raises:
        InputError: pyarrow is missing, or the file cannot be written.
    """
    pyarrow = _pyarrow()
    measurements, records = store.measurements(), store.records()
    rows = [(_MEASUREMENT, m.to_data(), packed(store.trace(m.id))) for m in measurements]
    rows += [(r.kind, r.to_data(), b"") for r in records]
    flat = measurements_frame(measurements).to_dict("records")
    flat += frame_of(
        {"id": r.id, "created": r.created, "plan_name": r.name, "source": "measured"}
        for r in records
    ).to_dict("records")
    frame = frame_of({str(k): v for k, v in row.items()} for row in flat)
    frame["record_kind"] = [kind for kind, _, _ in rows]
    frame["record"] = [json.dumps(data) for _, data, _ in rows]
    frame["trace"] = [trace for _, _, trace in rows]
    table = pyarrow.Table.from_pandas(frame, preserve_index=False)
    temporary = path.with_name(f".{path.name}")
    try:
        pyarrow.parquet.write_table(table, temporary)
        temporary.replace(path)
    except OSError as error:
        raise InputError(
            Violation(file=str(path), rule=f"cannot be written: {error.strerror or error}")
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return len(rows)


def import_parquet(store: Store, path: Path) -> tuple[int, int]:
    """Adds what a file holds; returns (new, already there).

    Raises:
        InputError: pyarrow is missing, the file is none of ours or truncated, a record cannot
            be read, or the store holds another one under an id.
    """
    rows = list(_rows(path))
    new = 0
    for measurement, record, trace in rows:
        if measurement is not None:
            new += store.add(measurement, trace)
        elif record is not None:
            new += store.add_record(record)
    return new, len(rows) - new


def _rows(path: Path) -> Iterator[tuple[Measurement | None, Record | None, Any]]:
    pyarrow = _pyarrow()
    try:
        table = pyarrow.parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        rule = f"not a readable Parquet file: {str(error).splitlines()[0]}"
        raise InputError(
            Violation(file=str(path), rule=rule, nearest_fix="export it again")
        ) from error
    missing = [c for c in _OWN if c not in table.column_names]
    if missing:
        raise InputError(
            Violation(
                file=str(path),
                field=", ".join(missing),
                rule="columns are missing: the file is no export of a store",
                nearest_fix="write it with: flopwright store export FILE.parquet",
            )
        )
    reader: TypeAdapter[Record] = TypeAdapter(AnyRecord)
    columns = [table.column(c).to_pylist() for c in _OWN]
    for number, (kind, text, trace) in enumerate(zip(*columns, strict=True), 1):
        try:
            if kind == _MEASUREMENT:
                found = Measurement.model_validate_json(text)
                yield found, None, unpacked(trace, f"trace of {found.id}") if trace else ()
            else:
                yield None, reader.validate_json(text), ()
        except ValidationError as error:
            rule = f"row {number} cannot be read: {error.errors()[0]['msg']}"
            raise InputError(Violation(file=str(path), rule=rule)) from error


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise InputError(
            Violation(
                rule=f"Parquet needs pyarrow: {error}",
                nearest_fix="pip install 'flopwright[parquet]'",
            )
        ) from error
    return pyarrow
