"""A text in pieces that are read by themselves, so that none of it has to stand in memory.

A piece is some text files, a run of a JSONL file's bytes, a row group of a Parquet file or a
record batch of an Arrow file.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

from flopwright.errors import InputError, Violation
from flopwright.executor.data.records import (
    arrow_batches,
    read_arrow_batch,
    read_jsonl_range,
    read_row_group,
    row_groups,
)
from flopwright.executor.data.sources import Source, find_source
from flopwright.executor.data.text import no_text, read_document

PIECE_BYTES: Final = 2**18
MAX_PIECES: Final = 2**16
_MARKED_BYTES: Final = 2**16

Kind = Literal["files", "bytes", "row_group", "record_batch"]


class Piece(NamedTuple):
    """What a piece is read from.

    Attributes:
        files: one, or several text files.
        first, stop: bytes of a JSONL file; of a row group or a record batch its number is first.
        root: the folder that text files must lie in; "" for a file that was named.
        marks: of each file its size and a checksum of its beginning, when the text was looked at.
    """

    kind: Kind
    files: tuple[str, ...]
    first: int = 0
    stop: int = 0
    root: str = ""
    marks: tuple[str, ...] = ()

    def documents(self) -> Iterator[str]:
        """Yields the documents that are not blank, in order.

        Raises:
            InputError: a broken record, with its file and place in it, or a file that has
                changed since the text was looked at.
        """
        self._refuse_changed()
        return (text for text in self._texts() if text.strip())

    def _refuse_changed(self) -> None:
        for name, mark in zip(self.files, self.marks, strict=True):
            if _mark(Path(name)) != mark:
                rule = "the file has changed since the run began: its data would be another"
                fix = "bring the text back, or begin a new run in another folder"
                raise InputError(Violation(file=name, rule=rule, nearest_fix=fix))

    def _texts(self) -> Iterator[str]:
        path = Path(self.files[0])
        if self.kind == "bytes":
            return read_jsonl_range(path, self.first, self.stop)
        if self.kind == "row_group":
            return read_row_group(path, self.first)
        if self.kind == "record_batch":
            return read_arrow_batch(path, self.first)
        root = Path(self.root) if self.root else None
        found = (read_document(Path(name), root) for name in self.files)
        return (text for text in found if text is not None)


def find_pieces(path: Path | None) -> tuple[tuple[Piece, ...], str]:
    """Returns the pieces of a text in the order of its files, and what it is called.

    Raises:
        InputError: there is no text, or a file that says nothing of its parts.
    """
    source = find_source(path)
    size = max(PIECE_BYTES, sum(map(_size, source.files)) // MAX_PIECES)
    found = list(_of_records(source, size) if source.records else _of_texts(source, size))
    marks = {name: _mark(Path(name)) for piece in found for name in piece.files}
    pieces = tuple(p._replace(marks=tuple(marks[name] for name in p.files)) for p in found)
    if not pieces:
        assert path is not None
        raise no_text(path, 0)
    return pieces, source.name


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0  # a dangling link; reading it gives nothing


def _mark(path: Path) -> str:
    """Returns a file's size and a checksum of its first bytes; nothing where it cannot be read."""
    if not path.is_file():
        return ""  # opening a named pipe waits for a writer
    try:
        with path.open("rb") as file:
            return f"{path.stat().st_size}-{zlib.crc32(file.read(_MARKED_BYTES)):08x}"
    except OSError:
        return ""


def _of_texts(source: Source, size: int) -> Iterator[Piece]:
    root = "" if source.root is None else str(source.root.resolve())
    together: list[str] = []
    have = 0
    for path in source.files:
        together.append(str(path.absolute()))
        have += _size(path)
        if have >= size:
            yield Piece("files", tuple(together), root=root)
            together, have = [], 0
    if together:
        yield Piece("files", tuple(together), root=root)


def _of_records(source: Source, size: int) -> Iterator[Piece]:
    for path in source.files:
        name = (str(path.absolute()),)
        if path.suffix == ".parquet":
            yield from (Piece("row_group", name, group) for group in range(row_groups(path)))
        elif path.suffix == ".arrow":
            yield from (Piece("record_batch", name, n) for n in range(arrow_batches(path)))
        else:
            end = _size(path)
            for first in range(0, end, size):
                yield Piece("bytes", name, first, min(end, first + size))


def write_pieces(path: Path, pieces: Sequence[Piece]) -> None:
    """Writes pieces so that a reader sees all of them or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(pieces), encoding="utf-8")
    temporary.replace(path)


def read_pieces(path: Path) -> tuple[Piece, ...]:
    """Returns what `write_pieces` wrote.

    Raises:
        InputError: the file is missing or is none.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        return tuple(
            Piece(k, tuple(files), a, b, root, tuple(marks))
            for k, files, a, b, root, marks in rows
        )
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} does not hold the pieces of a text: {error}") from error
