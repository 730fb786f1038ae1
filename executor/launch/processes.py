"""torchrun as a process of the launcher: its start, its end, and what signals become of it."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Final

from flopwright.executor.launch.machine import die_with_parent
from flopwright.executor.launch.progress import Progress
from flopwright.executor.launch.request import STOP_FILE, STOP_NOW_FILE

# What progress says once the user asked to stop, and once the machine's scheduler did.
STOPPING: Final = "stopping after this round (Ctrl-C again to end now)"
STOPPING_NOW: Final = "stopping after this step (SIGTERM again to end now)"
_GRACE_S: Final = 40.0  # torchrun gives its ranks 30 s before it kills them


def start_torchrun(
    command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Starts torchrun, which ends with this process; its output goes to `log`."""
    return subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        start_new_session=True,  # Ctrl-C is ours to handle: the ranks finish their round
        preexec_fn=die_with_parent,  # a run must not go on without who watches it
    )


def end_torchrun(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and with it the ranks, if they still run."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(slots=True)
class StopRequests:
    """What the launcher was told: to stop, and again to end at once."""

    asked: bool = False
    killed: bool = False


@contextmanager
def stop_requests(out_dir: Path, on_progress: Progress, *, saves: bool) -> Iterator[StopRequests]:
    """Passes the first Ctrl-C or SIGTERM on to the ranks; the second one ends them.

    Ctrl-C ends the run after the present round, measured and saved. SIGTERM leaves less time:
    the ranks finish their step, save and end.

    Args:
        saves: whether the ranks save at all; without it SIGTERM is as Ctrl-C.
    """
    state = StopRequests()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if state.asked:
            state.killed = True
            return
        state.asked = True
        now = saves and number == signal.SIGTERM
        (out_dir / (STOP_NOW_FILE if now else STOP_FILE)).touch()
        on_progress({"phase": STOPPING_NOW if now else STOPPING, "share": 0})

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
