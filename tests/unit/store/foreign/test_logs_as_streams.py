"""Files that are no logs are refused after their first block; logs are read a line at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from flopwright.errors import InputError
from flopwright.store.foreign import text
from flopwright.store.foreign.kineto import read_kineto
from flopwright.store.foreign.steps import read_steps
from flopwright.store.foreign.text import OPEN_END, numbered_lines
from flopwright.store.foreign.verl import read_verl


@pytest.mark.parametrize(
    "read",
    [lambda p: read_steps(p, "megatron"), read_verl, read_kineto],
    ids=("megatron", "verl", "kineto"),
)
def test_a_file_of_nothing_is_refused_at_its_first_block(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    log = tmp_path / "sparse.log"
    with log.open("wb") as file:
        file.truncate(2**27)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=r"is no (JSON )?text"):
            read(log)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_LONGEST_LINE", 100)
    log = tmp_path / "long.log"
    log.write_text("short\n" + "a" * 99 + "\n" + "b" * 1000)
    with pytest.raises(InputError, match=r"long\.log:3: the line is too long"):
        list(numbered_lines(log))


def test_lines_are_those_of_the_file(tmp_path: Path) -> None:
    log = tmp_path / "some.log"
    log.write_bytes("a \r\nb\rc\x0cd\u2028e\n\n\x1b[31mend\x1b[0m".encode())
    assert list(numbered_lines(log)) == [
        (1, "a"),
        (2, "b"),
        (3, "c\x0cd\u2028e"),
        (4, ""),
        (5, "end" + OPEN_END),
    ]
