"""Which text a run trains on: a folder, a file, JSONL, Parquet, or Python's own library.

Files are only read, never run. The order of documents depends on their paths alone, so the
same text gives the same tokens on every machine.
"""

from __future__ import annotations

import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation
from flopwright.executor.data.records import read_jsonl, read_parquet

_TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .org .tex .html .py .pyi .c .h .cc .cpp .hpp .rs .go .java .kt
    .js .ts .rb .sh .sql
"""
TEXT_SUFFIXES: Final = frozenset(_TEXT_SUFFIXES.split())
RECORD_READERS: Final[dict[str, Callable[[Path], Iterator[str]]]] = {
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
}
MAX_FILE_BYTES: Final = 256 * 2**20
MAX_TEXT_BYTES: Final = 512 * 2**20
MIN_LIBRARY_BYTES: Final = 5_000_000
# Tests and caches of the standard library hold made-up bytes; site-packages is not part of it.
_NOT_LIBRARY: Final = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


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

    A folder gives one document a text file, or, where it has no text file, the records of
    its JSONL and Parquet files; a JSONL or Parquet file gives one document a record (field
    or column `text`); any other file is one document.

    Raises:
        InputError: nothing there, nothing readable in it, or a broken record (with file and
            line or row group).
    """
    if path is None:
        return load_standard_library()
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise InputError(
            Violation(
                field="--text",
                value=str(path),
                rule="no such file or folder",
                nearest_fix="pass a folder, a text file, a .jsonl or a .parquet",
            )
        )
    if path.suffix in RECORD_READERS:
        documents, truncated = _take(RECORD_READERS[path.suffix](path))
        return _nonempty(
            TextCorpus(documents=documents, source=f"file {path}", truncated=truncated), path
        )
    text = _read_document(path)
    if text is not None:
        documents, _ = _take(iter((text,)))
        return _nonempty(TextCorpus(documents=documents, source=f"file {path}"), path)
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
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        p for p in _walk(root, {".py"}) if not _NOT_LIBRARY & set(p.relative_to(root).parts[:-1])
    ]
    corpus = _read_files(files, root, f"standard library of Python {platform.python_version()}")
    if corpus.text_bytes < minimum_bytes:
        raise InputError(
            Violation(
                field="--text",
                rule="the Python standard library here has too little source text to train on",
                value=f"{corpus.text_bytes} bytes in {root}",
                limit=f"at least {minimum_bytes} bytes",
                nearest_fix="pass --text with a folder of text, a .jsonl or a .parquet file",
            )
        )
    return corpus


def _folder(root: Path) -> TextCorpus:
    files = _walk(root, TEXT_SUFFIXES)
    if files:
        return _nonempty(_read_files(files, root, f"folder {root}"), root)
    records = [p for p in _walk(root, set(RECORD_READERS)) if _inside(p, root)]
    documents, truncated = _take(d for p in records for d in RECORD_READERS[p.suffix](p))
    return _nonempty(
        TextCorpus(documents=documents, source=f"folder {root}", truncated=truncated), root
    )


def _walk(root: Path, suffixes: set[str] | frozenset[str]) -> list[Path]:
    """Returns the files below `root` with one of the suffixes, by path; no hidden folders."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        found += [
            Path(folder, n) for n in names if Path(n).suffix in suffixes and not n.startswith(".")
        ]
    return sorted(found, key=lambda p: p.relative_to(root).parts)


def _inside(path: Path, root: Path) -> bool:
    """Returns whether the file, its links followed, is a regular file below `root`."""
    try:
        return path.resolve(strict=True).is_relative_to(root.resolve()) and path.is_file()
    except OSError:
        return False


def _read_document(path: Path) -> str | None:
    """Returns the file's text, or None for one that is binary, unreadable or too large."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            return None
        data = path.read_bytes()
        return None if b"\0" in data else data.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _read_files(files: list[Path], root: Path, source: str) -> TextCorpus:
    skipped = 0

    def documents() -> Iterator[str]:
        nonlocal skipped
        for path in files:
            text = _read_document(path) if _inside(path, root) else None
            if text is None:
                skipped += 1
            else:
                yield text

    taken, truncated = _take(documents())
    return TextCorpus(documents=taken, source=source, skipped=skipped, truncated=truncated)


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
    raise InputError(
        Violation(
            field="--text",
            value=str(path),
            rule=f"no text in it ({corpus.skipped} files skipped as binary or unreadable)",
            nearest_fix=f"text files end in {', '.join(sorted(TEXT_SUFFIXES)[:6])}, ...; "
            "or pass a .jsonl or .parquet file with a field 'text'",
        )
    )
