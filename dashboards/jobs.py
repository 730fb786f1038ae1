"""Long work in processes of its own: it can be watched, stopped, and never holds up a page.

A job is known by what was asked, so two sessions that ask the same share it, and what was
answered once stays. It runs as long as somebody looks at it (`Job.look`): a closed browser
ends it after a while, `Job.leave` and `Job.stop` at once.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, Literal

from flopwright.errors import InputError, Violation
from flopwright.spec.base import Spec

State = Literal["waits", "runs", "done", "failed", "stopped"]
_KEPT: Final = 64
_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.25
# Before a job that nobody pressed a button for: the page draws itself first.
GRACE_S: Final = 2.5
_LOGGER: Final = logging.getLogger(__name__)


class Job:
    """One request to dashboards/worker.py, and how far it is.

    Attributes:
        done, total: of the work; total 0 where it is not known.
        answer: once state is "done"; error: once it is "failed".
    """

    def __init__(self, task: str, asked: dict[str, Any], read: Callable[[Any], Any]) -> None:
        self.task, self.asked, self.read = task, asked, read
        self.state: State = "waits"
        self.done, self.total, self.note = 0, 0, ""
        self.answer: Any = None
        self.error: InputError | None = None
        self.began_s = time.monotonic()
        self._watchers: dict[str, float] = {}

    @property
    def is_going(self) -> bool:
        """Whether an answer may still come."""
        return self.state in {"waits", "runs"}

    @property
    def text(self) -> str:
        """What it is doing, for a progress bar."""
        if self.state == "waits":
            return "waits for other work to end"
        seconds = time.monotonic() - self.began_s
        return f"{self.note or 'starting'} ({seconds:.0f} s)"

    def look(self, watcher: str) -> None:
        """Says that somebody waits for the answer."""
        self._watchers[watcher] = time.monotonic()

    def leave(self, watcher: str) -> None:
        """Says that the watcher wants something else now."""
        self._watchers.pop(watcher, None)
        if not self._watchers:
            self.stop()

    def stop(self) -> None:
        """Ends the work, without an answer."""
        if self.is_going:
            self.state = "stopped"

    def is_wanted(self) -> bool:
        """Whether the work should go on."""
        now = time.monotonic()
        if not any(now - at < _PATIENCE_S for at in list(self._watchers.values())):
            self.stop()
        return self.is_going


class Jobs:
    """The jobs of this server by what was asked, those not looked at for longest forgotten.

    Args:
        most: jobs that run at once; the others wait.
    """

    def __init__(self, most: int) -> None:
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(most)
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._spare: subprocess.Popen[bytes] | None = None
        self._closed = False

    def get(self, key: str) -> Job | None:
        """Returns the job, None where nothing was asked or it was forgotten."""
        with self._lock:
            return self._jobs.get(key)

    def ask(
        self,
        key: str,
        task: str,
        asked: dict[str, Any],
        read: Callable[[Any], Any],
        watcher: str,
        delay_s: float = 0.0,
    ) -> Job:
        """Returns the job of `key`, started where there is none that may still answer."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None or job.state in {"failed", "stopped"}:
                job = self._jobs[key] = Job(task, asked, read)
                job.look(watcher)
                threading.Thread(target=self._run, args=(job, delay_s), daemon=True).start()
            job.look(watcher)
            self._jobs.move_to_end(key)
            ended = [k for k, j in self._jobs.items() if not j.is_going]
            for old in ended[: max(0, len(self._jobs) - _KEPT)]:
                del self._jobs[old]
            return job

    def close(self) -> None:
        """Ends all work."""
        with self._lock:
            self._closed = True
            for job in self._jobs.values():
                job.stop()
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.kill()
            _ended(spare)

    def get_ready(self) -> None:
        """Starts the process that the next job will use: imports take a second."""
        with self._lock:
            if self._spare is None and not self._closed:
                self._spare = _started()

    def _run(self, job: Job, delay_s: float) -> None:
        time.sleep(delay_s)
        while job.is_wanted():
            if self._slots.acquire(timeout=_LOOK_S):
                try:
                    self._served(job)
                finally:
                    self._slots.release()
                return

    def _served(self, job: Job) -> None:
        """Runs the job in a process, to its end or until nobody wants it."""
        with self._lock:
            process, self._spare = self._spare, None
        if process is None or process.poll() is not None:
            process = _started()
        job.began_s = time.monotonic()
        if job.state == "waits":
            job.state = "runs"
        assert process.stdin is not None
        try:
            request = json.dumps({"task": job.task, "asked": job.asked})
            process.stdin.write(request.encode() + b"\n")
            process.stdin.flush()
            for line in _lines(process, job):
                _heard(job, json.loads(line))
        except Exception as error:  # the thread's end must be seen on the page
            _LOGGER.exception("the work %s failed", job.task)
            _fail(job, InputError(f"this work failed: {error}"))
        finally:
            process.kill()
            _ended(process)
        if job.is_going:
            _fail(job, InputError("this work ended without an answer; the server's log says more"))
        self.get_ready()


def _heard(job: Job, said: dict[str, Any]) -> None:
    if "answer" in said:
        job.answer = job.read(said["answer"])
        if job.is_going:
            job.state = "done"
    elif "problems" in said:
        _fail(job, InputError([Violation(**v) for v in said["problems"]]))
    else:
        job.done, job.total, job.note = said["done"], said["total"], said["note"]


def _fail(job: Job, error: InputError) -> None:
    if job.is_going:
        job.error = error
        job.state = "failed"


def _ended(process: subprocess.Popen[bytes]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _started() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "flopwright.dashboards.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)


def _lines(process: subprocess.Popen[bytes], job: Job) -> Iterator[bytes]:
    """Yields what the process says; ends with it, or when nobody wants the work any more."""
    assert process.stdout is not None
    number, rest = process.stdout.fileno(), b""
    while job.is_wanted():
        if select.select([number], [], [], _LOOK_S)[0]:
            part = os.read(number, 1 << 20)
            if not part:
                return
            *lines, rest = (rest + part).split(b"\n")
            yield from lines


@cache
def jobs() -> Jobs:
    """Returns the jobs of this server; one core is left to the pages."""
    return Jobs(max(1, (os.cpu_count() or 2) - 1))


def key_of(task: str, subject: Spec, more: str = "") -> str:
    """Returns what a job on a record is known by."""
    return f"{task} {subject.content_hash()} {more}".rstrip()
