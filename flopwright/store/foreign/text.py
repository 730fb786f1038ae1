"""A log's lines, and how what is wrong with one is said."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from flopwright.errors import InputError, Violation

MAX_BYTES: Final = 2**30
_BLOCK_BYTES: Final = 2**16
_LONGEST_LINE: Final = 2**24
_STAMP: Final = re.compile(r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_STAMP_FORM: Final = "%Y-%m-%d %H:%M:%S"
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
CUT_SHORT: Final = "the line is cut short"
# Stands behind a last line without a line end, so that no number there is taken for whole.
OPEN_END: Final = "\N{HORIZONTAL ELLIPSIS}"


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (number, line) from 1 on, colours and line ends taken off.

    A last line without a line end has OPEN_END behind it. Of the file a line at a time is held.

    Raises:
        InputError: the file cannot be read, is too large, is no text, or has an endless line.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError(Violation(file=str(path), rule="the log is too large", limit="1 GiB"))
        with io.BufferedReader(path.open("rb", buffering=0), _BLOCK_BYTES) as raw:
            if b"\0" in raw.peek(_BLOCK_BYTES):
                raise InputError(Violation(file=str(path), rule="is no text"))
            yield from _lines(path, io.TextIOWrapper(raw, encoding="utf-8"))
    except OSError as error:
        rule = f"cannot be read: {error.strerror}"
        raise InputError(Violation(file=str(path), rule=rule)) from error
    except UnicodeDecodeError as error:
        rule = "is no text"
        raise InputError(Violation(file=str(path), rule=rule)) from error


def _lines(path: Path, text: io.TextIOWrapper) -> Iterator[tuple[int, str]]:
    number = 0
    while line := text.readline(_LONGEST_LINE):
        number += 1
        whole = line.endswith("\n")
        if len(line) == _LONGEST_LINE and not whole:
            raise broken(path, number, "the line is too long", "is this the log?")
        # A number at the open end of a file may have more digits.
        yield number, _COLOUR.sub("", line).rstrip() + ("" if whole else OPEN_END)


def when(text: str, form: str = _STAMP_FORM) -> float | None:
    """Returns the seconds since 1970 of a time stamp without a zone, taken as UTC.

    Only order and differences mean something where the writer's clock ran in another zone.
    None of a stamp in another form.
    """
    try:
        return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def last_stamp(text: str) -> float | None:
    """Returns the seconds since 1970 of the last time stamp in a text; None without one."""
    found = _STAMP.findall(text)
    return when(" ".join(found[-1])) if found else None


def iso_of(at_s: float) -> str:
    """Returns seconds since 1970 as the store writes dates: "2026-01-01T00:00:00+00:00"."""
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def broken(path: Path, line: int, rule: str, fix: str = "") -> InputError:
    """Returns the error of one line."""
    return InputError(
        Violation(
            file=str(path),
            line=line,
            rule=rule,
            nearest_fix=fix or "let the program end before its log is read, or take the line out",
        )
    )


def nothing_found(path: Path, kind: str, example: str) -> InputError:
    """Returns the error of a log without a single line of its kind."""
    return InputError(
        Violation(
            file=str(path),
            rule=f"holds no line of {kind}",
            nearest_fix=f"a line looks like: {example}",
        )
    )


def refuse_open_end(path: Path, line: int, text: str) -> None:
    """Raises InputError for a line that the file ends in: its last number may be half of one."""
    if text.endswith(OPEN_END):
        raise broken(
            path,
            line,
            f"{CUT_SHORT}: no line end stands behind it",
            "let the program end before its log is read; if the line is whole, end it",
        )
