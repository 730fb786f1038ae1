"""Starts runs without waiting for imports: launcher, torchrun and ranks are forks of one process.

    warm()                                     imports what they will need
    process = start_run(arguments, environment, log)

The programs and their processes are those of `flopwright run`: the command line's launcher,
torch's own agent, one process a rank, each with its own memory and session, each ended by itself
or with its parent. Only how they come to be differs: they are copies of a process that has
imported everything, and do not import it themselves, which is most of what a small run takes.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from flopwright.executor.launch.machine import die_with_parent
from flopwright.executor.launch.request import WORKER_MODULE

_FIRST_OWN: Final = 3  # file descriptors behind input, output and errors
_MOST_OPEN: Final = 1024
# Ran in every rank before the worker, as Python would run a sitecustomize module.
Hook = Callable[[], None]


class Forked:
    """A child, with what is used of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns the exit code, or minus the signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code once it has ended.

        Raises:
            subprocess.TimeoutExpired: it has not within the time.
        """
        import time

        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


def warm() -> None:
    """Imports what launcher, torchrun and ranks need; no thread may have been started before."""
    import torch
    import torch.distributed.run

    import flopwright.cli.run
    import flopwright.executor.checkpoint.load
    import flopwright.executor.launch.supervisor
    import flopwright.executor.parallel.data_parallel.deepspeed
    import flopwright.executor.parallel.data_parallel.fsdp2
    import flopwright.executor.train.worker  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # or each copy would go through all that was imported, and so own its pages


def start_run(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: IO[bytes],
    folder: Path,
    hook: Hook,
) -> Forked:
    """Starts `flopwright ARGUMENTS` in `folder`; `hook` is called in each rank first."""

    def program() -> int:
        import flopwright.executor.launch.local as local
        from flopwright.cli import main

        die_with_parent()
        os.chdir(folder)
        local.start_torchrun = _torchrun_starter(hook)
        main(list(arguments))
        return 0

    return _forked(program, environment, log, log)


def _torchrun_starter(hook: Hook) -> Any:
    """Returns what stands for `start_torchrun` in the launcher."""

    def start(command: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> Forked:
        def program() -> int:
            import torch.distributed.run
            from torch.distributed.elastic.multiprocessing import subprocess_handler

            die_with_parent()
            subprocess_handler.SubprocessHandler._popen = _rank_starter(hook)  # type: ignore[method-assign]
            torch.distributed.run.main(list(command[command.index("torch.distributed.run") + 1 :]))
            return 0

        return _forked(program, environment, log, log)

    return start


def _rank_starter(hook: Hook) -> Any:
    """Returns what stands for the agent's `Popen` of a rank."""

    def start(handler: Any, args: tuple[str, ...], env: Mapping[str, str]) -> Forked:
        def program() -> int:
            from flopwright.executor.train.worker import main

            hook()
            return main(list(args[args.index(WORKER_MODULE) + 1 :]))

        return _forked(program, env, handler._stdout, handler._stderr)

    return start


def _forked(
    program: Callable[[], int],
    environment: Mapping[str, str],
    out: IO[bytes] | None,
    err: IO[bytes] | None,
) -> Forked:
    """Runs `program` in a copy of this process, in a session of its own, which its result ends."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    code = 1
    try:
        _begin(environment, out, err)
        code = program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def _begin(environment: Mapping[str, str], out: IO[bytes] | None, err: IO[bytes] | None) -> None:
    """Gives a copy what a new program would have, and nothing else of its parent's."""
    os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (out, 1), (err, 2)):
        if source is not None:
            os.dup2(source if isinstance(source, int) else source.fileno(), target)
    os.closerange(_FIRST_OWN, _MOST_OPEN)
    os.environ.clear()
    os.environ.update(environment)
