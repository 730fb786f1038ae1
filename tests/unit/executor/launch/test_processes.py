"""What becomes of signals to the launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from flopwright.executor.launch.processes import stop_requests


@pytest.mark.parametrize(
    ("number", "saves", "file"),
    [
        (signal.SIGINT, True, "stop"),
        (signal.SIGTERM, True, "stop-now"),
        (signal.SIGTERM, False, "stop"),  # there is nothing to be saved in a hurry
    ],
)
def test_the_first_signal_is_passed_on_and_the_second_ends(
    number: signal.Signals, saves: bool, file: str, tmp_path: Path
) -> None:
    said: list[str] = []
    before = signal.getsignal(number)
    with stop_requests(tmp_path, lambda e: said.append(e["phase"]), saves=saves) as state:
        os.kill(os.getpid(), number)
        assert state.asked
        assert not state.killed
        assert [path.name for path in tmp_path.iterdir()] == [file]
        assert len(said) == 1
        os.kill(os.getpid(), number)
        assert state.killed
    assert signal.getsignal(number) is before
