"""Documents out of JSONL and Parquet files: the field or column `text` of each record."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation

TEXT_FIELD: Final = "text"
MAX_LINE_BYTES: Final = 64 * 2**20
MAX_ROW_GROUP_BYTES: Final = 2 * 2**30


def _broken(path: Path, rule: str, *, line: int = 0, fix: str = "", value: str = "") -> InputError:
    return InputError(
        Violation(
            file=str(path), line=line, field=TEXT_FIELD, value=value, rule=rule, nearest_fix=fix
        )
    )


def read_jsonl(path: Path) -> Iterator[str]:
    """Yields the `text` of each line.

    Raises:
        InputError: a line that is no JSON object with a string `text`; names file and line.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
                if len(line) > MAX_LINE_BYTES:
                    raise _broken(path, f"a line over {MAX_LINE_BYTES} bytes", line=number)
                if line.strip():
                    yield _line_text(path, number, line)
    except OSError as error:
        raise _broken(path, f"cannot read the file: {error.strerror}") from error


def _line_text(path: Path, number: int, line: bytes) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"the line is not JSON: {error}", line=number) from error
    text = record.get(TEXT_FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise _broken(
            path,
            "the line is not an object with a string field 'text'",
            line=number,
            value=type(record).__name__ if not isinstance(record, dict) else "",
            fix=f"its fields: {', '.join(sorted(record))}" if isinstance(record, dict) else "",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _broken(path, "the text holds half of a surrogate pair", line=number) from error
    return text


def read_parquet(path: Path) -> Iterator[str]:
    """Yields the column `text`, row by row.

    Raises:
        InputError: no Parquet file, no string column `text`, or a row group that cannot be
            read; names file and row group.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, f"not a readable Parquet file: {error}") from error
    with file:
        schema = file.schema_arrow
        if TEXT_FIELD not in schema.names or not _is_string(schema.field(TEXT_FIELD).type):
            raise _broken(
                path,
                "the file has no string column 'text'",
                fix=f"its columns: {', '.join(schema.names)}",
            )
        for group in range(file.num_row_groups):
            size = file.metadata.row_group(group).total_byte_size
            if size > MAX_ROW_GROUP_BYTES:
                raise _broken(path, f"row group {group} is over {MAX_ROW_GROUP_BYTES} bytes")
            try:
                column = file.read_row_group(group, columns=[TEXT_FIELD]).column(0).to_pylist()
            except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
                raise _broken(path, f"row group {group} cannot be read: {error}") from error
            for row, text in enumerate(column):
                if text is None:
                    raise _broken(path, f"row {row} of row group {group} has no text")
                yield text


def _is_string(kind: object) -> bool:
    return str(kind) in {"string", "large_string", "string_view"}
