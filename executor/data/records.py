"""Documents out of JSONL, Parquet and Arrow files: the field or column `text` of each record.

Every file can be read whole or in parts: a run of a JSONL file's bytes, a row group of a Parquet
file, a record batch of an Arrow file (what a Hugging Face dataset is saved as).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

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


def read_jsonl_range(path: Path, start: int, stop: int) -> Iterator[str]:
    """Yields the `text` of each line that begins at bytes start .. stop - 1 of the file.

    Raises:
        InputError: as `read_jsonl`; names the byte at which the line begins.
    """
    try:
        with path.open("rb") as file:
            if start:  # the line that byte start - 1 is of belongs to the part before
                file.seek(start - 1)
                file.readline()
            while (at := file.tell()) < stop:
                line = file.readline(MAX_LINE_BYTES + 1)
                if not line:
                    return
                if len(line) > MAX_LINE_BYTES:
                    raise _broken(path, f"a line over {MAX_LINE_BYTES} bytes", value=f"byte {at}")
                if line.strip():
                    yield _line_text(path, 0, line, f"the line at byte {at}")
    except OSError as error:
        raise _broken(path, f"cannot read the file: {error.strerror}") from error


def _line_text(path: Path, number: int, line: bytes, what: str = "the line") -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"{what} is not JSON: {error}", line=number) from error
    text = record.get(TEXT_FIELD) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise _broken(
            path,
            f"{what} is not an object with a string field 'text'",
            line=number,
            value=type(record).__name__ if not isinstance(record, dict) else "",
            fix=f"its fields: {', '.join(sorted(record))}" if isinstance(record, dict) else "",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _broken(path, f"{what} holds half of a surrogate pair", line=number) from error
    return text


def read_parquet(path: Path) -> Iterator[str]:
    """Yields the column `text`, row by row.

    Raises:
        InputError: no Parquet file, no string column `text`, or a row group that cannot be
            read; names file and row group.
    """
    for group in range(row_groups(path)):
        yield from read_row_group(path, group)


def row_groups(path: Path) -> int:
    """Returns the number of row groups of a Parquet file.

    Raises:
        InputError: no Parquet file, or no string column `text`.
    """
    with _parquet(path) as file:
        count: int = file.num_row_groups
        return count


def read_row_group(path: Path, group: int) -> Iterator[str]:
    """Yields the column `text` of one row group; errors as `read_parquet`."""
    import pyarrow as pa

    with _parquet(path) as file:
        size = file.metadata.row_group(group).total_byte_size
        if size > MAX_ROW_GROUP_BYTES:
            raise _broken(path, f"row group {group} is over {MAX_ROW_GROUP_BYTES} bytes")
        try:
            column = file.read_row_group(group, columns=[TEXT_FIELD]).column(0).to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            raise _broken(path, f"row group {group} cannot be read: {error}") from error
    yield from _texts(path, column, f"row group {group}")


def _parquet(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise _broken(path, f"not a readable Parquet file: {error}") from error
    _check_column(path, file.schema_arrow)
    return file


def read_arrow(path: Path) -> Iterator[str]:
    """Yields the column `text` of an Arrow file, row by row.

    Raises:
        InputError: no Arrow file, no string column `text`, or a record batch that cannot be
            read; names file and batch.
    """
    for number, column in enumerate(_arrow_columns(path)):
        yield from _texts(path, column, f"record batch {number}")


def arrow_batches(path: Path) -> int:
    """Returns the number of record batches of an Arrow file, whose rows are not read.

    Raises:
        InputError: as `read_arrow`.
    """
    return sum(1 for _ in _arrow_batches(path))


def read_arrow_batch(path: Path, number: int) -> Iterator[str]:
    """Yields the column `text` of one record batch; errors as `read_arrow`."""
    for at, batch in enumerate(_arrow_batches(path)):
        if at == number:
            yield from _texts(path, _column(path, batch, at), f"record batch {at}")
            return


def _arrow_columns(path: Path) -> Iterator[list[str | None]]:
    for number, batch in enumerate(_arrow_batches(path)):
        yield _column(path, batch, number)


def _column(path: Path, batch: Any, number: int) -> list[str | None]:
    try:
        found: list[str | None] = batch.column(TEXT_FIELD).to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's own errors are ValueErrors
        raise _broken(path, f"record batch {number} cannot be read: {error}") from error
    return found


def _arrow_batches(path: Path) -> Iterator[Any]:
    """Yields the record batches, mapped, of either of Arrow's file formats."""
    import pyarrow as pa

    number = 0
    try:
        with pa.memory_map(str(path)) as source:
            try:
                reader = pa.ipc.open_stream(source)
            except pa.ArrowInvalid:
                source.seek(0)
                reader = pa.ipc.open_file(source)
                _check_column(path, reader.schema)
                for number in range(reader.num_record_batches):
                    yield reader.get_batch(number)
                return
            _check_column(path, reader.schema)
            for batch in reader:
                yield batch
                number += 1
    except (pa.ArrowException, OSError) as error:
        rule = f"not a readable Arrow file: record batch {number}: {error}"
        raise _broken(path, rule) from error


def _check_column(path: Path, schema: Any) -> None:
    if TEXT_FIELD not in schema.names or not _is_string(schema.field(TEXT_FIELD).type):
        raise _broken(
            path,
            "the file has no string column 'text'",
            fix=f"its columns: {', '.join(schema.names)}",
        )


def _texts(path: Path, column: list[str | None], where: str) -> Iterator[str]:
    for row, text in enumerate(column):
        if text is None:
            raise _broken(path, f"row {row} of {where} has no text")
        yield text


def _is_string(kind: object) -> bool:
    return str(kind) in {"string", "large_string", "string_view"}
