"""Files are written whole, and as readable as the user's umask lets any other file be."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from flopwright.cli import main
from flopwright.errors import InputError
from flopwright.simulator.calibration.files import write_atomically


@pytest.fixture(params=[0o022, 0o027, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("content", ["text µ", b"\x89PNG\r\n"])
def test_the_mode_is_the_umasks(tmp_path: Path, umask: int, content: str | bytes) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, content)
    assert _mode(path) == 0o666 & ~umask
    assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


def test_a_plan_and_a_picture_can_be_read_by_others(tmp_path: Path) -> None:
    plan, picture = tmp_path / "plan.yaml", tmp_path / "rounds.png"
    before = os.umask(0o022)
    try:
        for arguments in (
            ["plan", "kimi_k2_mini_2cpu_fp32", "--top", "1", "--out", str(plan)],
            ["rollouts", "small_exponential_1gpu", "--rounds", "1", "--png", str(picture)],
        ):
            with pytest.raises(SystemExit) as stop:
                main(arguments)
            assert not stop.value.code
    finally:
        os.umask(before)
    assert _mode(plan) == 0o644
    assert _mode(picture) == 0o644


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="cannot write the file"):
        write_atomically(tmp_path / "folder", "text")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
