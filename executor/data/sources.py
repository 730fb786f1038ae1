"""Which files a text is made of: a folder, a file, JSONL, Parquet, a saved Hugging Face dataset.

Their order depends on their paths alone, so that the same text gives the same tokens on every
machine. Nothing is read here but lists of files.
"""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.executor.data.records import read_arrow, read_jsonl, read_parquet

_TEXT_SUFFIXES = """
    .txt .text .md .markdown .rst .org .tex .html .py .pyi .c .h .cc .cpp .hpp .rs .go .java .kt
    .js .ts .rb .sh .sql
"""
TEXT_SUFFIXES: Final = frozenset(_TEXT_SUFFIXES.split())
RECORD_READERS: Final[dict[str, Callable[[Path], Iterator[str]]]] = {
    ".jsonl": read_jsonl,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
}
# What says of a folder that `datasets` saved it: one dataset, or several splits.
_SAVED: Final = "state.json"
_SPLITS: Final = "dataset_dict.json"
# What lies beside records and is none of the data.
_NOTES: Final = frozenset({"readme.md", "license.md", "license.txt"})
# Tests and caches of the standard library hold made-up bytes; site-packages is not part of it.
_NOT_LIBRARY: Final = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The files of a text, in order.

    Attributes:
        name: where they come from, for people and for the run's record.
        root: the folder they must lie in, links followed; None for a file that was named.
        records: whether each holds many documents; otherwise each is one.
    """

    name: str
    files: tuple[Path, ...]
    records: bool
    root: Path | None = None


def find_source(path: Path | None) -> Source:
    """Returns the files of `path`, or of the Python standard library for None.

    A folder that the library `datasets` saved gives its Arrow files (its split `train` where it
    has several); another folder its text files, or, where it has none but notes, its JSONL,
    Parquet and Arrow files; a file is itself.

    Raises:
        InputError: nothing there, or a saved dataset whose files cannot be told.
    """
    if path is None:
        return _standard_library()
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
    return Source(name=f"file {path}", files=(path,), records=path.suffix in RECORD_READERS)


def _standard_library() -> Source:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        p for p in _walk(root, {".py"}) if not _NOT_LIBRARY & set(p.relative_to(root).parts[:-1])
    ]
    name = f"standard library of Python {platform.python_version()}"
    return Source(name=name, files=tuple(files), records=False, root=root)


def _folder(root: Path) -> Source:
    if (root / _SPLITS).is_file() or (root / _SAVED).is_file():
        chosen = _split_of(root) if (root / _SPLITS).is_file() else root
        return Source(
            name=f"dataset {chosen}", files=_saved_files(chosen), records=True, root=root
        )
    texts = _walk(root, TEXT_SUFFIXES)
    records = [p for p in _walk(root, set(RECORD_READERS)) if inside(p, root)]
    notes = all(p.parent == root and p.name.lower() in _NOTES for p in texts)
    if texts and not (records and notes):
        return Source(name=f"folder {root}", files=tuple(texts), records=False, root=root)
    return Source(name=f"folder {root}", files=tuple(records), records=True, root=root)


def _split_of(root: Path) -> Path:
    splits = _json(root / _SPLITS).get("splits")
    names = [s for s in splits if isinstance(s, str)] if isinstance(splits, list) else []
    chosen = "train" if "train" in names or len(names) != 1 else names[0]
    if chosen in names and (root / chosen / _SAVED).is_file():
        return root / chosen
    raise InputError(
        Violation(
            file=str(root / _SPLITS),
            field="splits",
            value=", ".join(names),
            rule="the dataset has no split 'train', and not one split alone",
            nearest_fix="pass the folder of one of its splits",
        )
    )


def _saved_files(root: Path) -> tuple[Path, ...]:
    entries = _json(root / _SAVED).get("_data_files")
    names = [
        entry.get("filename") for entry in entries if isinstance(entry, dict)
    ] if isinstance(entries, list) else []  # fmt: skip
    files = tuple(root / name for name in names if isinstance(name, str))
    if files and all(inside(file, root) for file in files):
        return files
    raise InputError(
        Violation(
            file=str(root / _SAVED),
            field="_data_files",
            rule="names no files, or files that are not in the folder",
            nearest_fix="save the dataset again (Dataset.save_to_disk)",
        )
    )


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(Violation(file=str(path), rule=f"cannot be read: {error}")) from error
    if not isinstance(data, dict):
        raise InputError(Violation(file=str(path), rule="is no JSON object"))
    return data


def _walk(root: Path, suffixes: set[str] | frozenset[str]) -> list[Path]:
    """Returns the files below `root` with one of the suffixes, by path; no hidden folders."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root, followlinks=False):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        found += [
            Path(folder, n) for n in names if Path(n).suffix in suffixes and not n.startswith(".")
        ]
    return sorted(found, key=lambda p: p.relative_to(root).parts)


def inside(path: Path, root: Path) -> bool:
    """Returns whether the file, its links followed, is a regular file below `root`."""
    try:
        return path.resolve(strict=True).is_relative_to(root.resolve()) and path.is_file()
    except OSError:
        return False
