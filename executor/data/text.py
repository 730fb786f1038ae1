"""The documents of a text that is read whole, before a run begins.

Files are only read, never run. `sources.py` says which they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.executor.data.sources import (
    RECORD_READERS,
    TEXT_SUFFIXES,
    Source,
    find_source,
    inside,
)

MAX_FILE_BYTES: Final = 256 * 2**20
MAX_TEXT_BYTES: Final = 512 * 2**20
MIN_LIBRARY_BYTES: Final = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class TextCorpus:
    """The documents of a run, in order.

    Attributes:
        source: where they come from, for people and for the run's record.
        skipped: files left out because they are binary, unreadable, too large or lead
            outside the folder.
        truncated: whether reading stopped at MAX_TEXT_BYTES.
    """

    documents: tuple[str, ...]
    source: str
    skipped: int = 0
    truncated: bool = False

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return sum(len(d.encode()) for d in self.documents)


def load_text(path: Path | None) -> TextCorpus:
    """Returns the documents of `path`, or of the Python standard library for None.

    A text file is one document, a record of JSONL, Parquet or Arrow one (field or column
    `text`); which files a folder gives says `sources.find_source`.

    Raises:
        InputError: nothing there, nothing readable in it, or a broken record (with file and
            line or row group).
    """
    if path is None:
        return load_standard_library()
    source = find_source(path)
    if source.records:
        documents, truncated = _take(d for p in source.files for d in RECORD_READERS[p.suffix](p))
        corpus = TextCorpus(documents=documents, source=source.name, truncated=truncated)
        return _nonempty(corpus, path)
    if source.root is not None:
        return _nonempty(_read_files(source), path)
    text = read_document(path)
    if text is not None:
        documents, _ = _take(iter((text,)))
        return _nonempty(TextCorpus(documents=documents, source=source.name), path)
    raise InputError(
        Violation(
            file=str(path),
            rule="not a readable UTF-8 text file",
            limit=f"{MAX_FILE_BYTES} bytes",
            nearest_fix="pass a folder, a text file, a .jsonl or a .parquet",
        )
    )


def load_standard_library(minimum_bytes: int = MIN_LIBRARY_BYTES) -> TextCorpus:
    """Returns the sources (with their docstrings) of this machine's Python standard library.

    Raises:
        InputError: less than `minimum_bytes` of it are installed.
    """
    source = find_source(None)
    corpus = _read_files(source)
    if corpus.text_bytes < minimum_bytes:
        raise InputError(
            Violation(
                field="--text",
                rule="the Python standard library here has too little source text to train on",
                value=f"{corpus.text_bytes} bytes in {source.root}",
                limit=f"at least {minimum_bytes} bytes",
                nearest_fix="pass --text with a folder of text, a .jsonl or a .parquet file",
            )
        )
    return corpus


def read_document(path: Path, root: Path | None = None) -> str | None:
    """Returns the file's text; None for one that is binary, unreadable, too large or elsewhere.

    Args:
        root: a folder that it must lie in, links followed.
    """
    if root is not None and not inside(path, root):
        return None
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        data = path.read_bytes()
        return None if b"\0" in data else data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _read_files(source: Source) -> TextCorpus:
    skipped = 0

    def documents() -> Iterator[str]:
        nonlocal skipped
        for path in source.files:
            text = read_document(path, source.root)
            if text is None:
                skipped += 1
            else:
                yield text

    taken, truncated = _take(documents())
    return TextCorpus(documents=taken, source=source.name, skipped=skipped, truncated=truncated)


def _take(documents: Iterator[str]) -> tuple[tuple[str, ...], bool]:
    """Returns the documents that are not blank up to MAX_TEXT_BYTES, and whether more came."""
    taken: list[str] = []
    room = MAX_TEXT_BYTES
    for text in documents:
        if not text.strip():
            continue
        room -= len(text.encode())
        if room < 0:
            return tuple(taken), True
        taken.append(text)
    return tuple(taken), False


def _nonempty(corpus: TextCorpus, path: Path) -> TextCorpus:
    if corpus.documents:
        return corpus
    if path.is_file():
        fix = "pass a folder, a text file, a .jsonl or a .parquet with text in it"
        rule = "the text is empty"
        raise InputError(Violation(field="--text", value=str(path), rule=rule, nearest_fix=fix))
    raise no_text(path, corpus.skipped)


def no_text(path: Path, skipped: int) -> InputError:
    """Returns what is said of a folder without text."""
    return InputError(
        Violation(
            field="--text",
            value=str(path),
            rule=f"no text in it ({skipped} files skipped as binary or unreadable)",
            nearest_fix=f"text files end in {', '.join(sorted(TEXT_SUFFIXES)[:6])}, ...; "
            "or pass a .jsonl or .parquet file with a field 'text'",
        )
    )
