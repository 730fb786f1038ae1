"""`flopwright dashboard` takes its server with it when it is asked to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

WAIT_S = 60


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_until(port: int, listening: bool) -> bool:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if _listens(port) is listening:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_ends_the_server_too(name: str, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "flopwright", "dashboard", "--headless", "--port", str(port)]
    # A session of its own: what is left over can be ended, whatever happens to the verb.
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"FLOPWRIGHT_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        assert _wait_until(port, listening=True)
        process.send_signal(getattr(signal, name))
        assert process.wait(timeout=WAIT_S) == 0
        assert not _listens(port)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
