"""One launcher at a time works in a run's folder. Imports no torch."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flopwright.errors import InputError, Violation


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other launchers out of a folder; the kernel gives it back if this process is killed.

    The folder itself is locked: nothing is written into it, and no rank inherits the lock. A file
    system that knows no locks keeps nobody out.

    Raises:
        InputError: another launcher is at work in it.
    """
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                Violation(
                    field="--out",
                    value=str(folder),
                    rule="another run is at work in this folder",
                    nearest_fix="wait for its end, or choose another folder",
                )
            ) from error
        except OSError:
            pass
        yield
    finally:
        os.close(place)
