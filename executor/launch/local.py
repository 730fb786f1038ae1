"""Starts a run on this machine, watches over it and reads what it wrote. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.executor.launch.checks import LaunchOptions, check_request
from flopwright.executor.launch.commands import rank_environment, torchrun_command
from flopwright.executor.launch.failure import cause, cause_text, read_records
from flopwright.executor.launch.machine import die_with_parent, find_machine
from flopwright.executor.launch.progress import Progress
from flopwright.executor.launch.request import (
    ERROR_DIR,
    LOG_DIR,
    PROBE_FILE,
    PROGRESS_FILE,
    REQUEST_FILE,
    STEPS_FILE,
    STOP_FILE,
    RunRequest,
    checkpoint_dir,
    measurement_file,
    write_json,
)
from flopwright.executor.launch.resume import clear_last_end, resumed_request
from flopwright.report.metrics import Measurement
from flopwright.report.probe import ProbeReport

# What progress says once the user asked to stop.
STOPPING: Final = "stopping after this round (Ctrl-C again to end now)"
_POLL_S: Final = 0.2
_GRACE_S: Final = 40.0  # torchrun gives its ranks 30 s before it kills them
_LOG_TAIL: Final = 15


class RunFailedError(Exception):
    """A run that started and did not end well: which rank, why, and where its log is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run left in its folder.

    Attributes:
        measurements: one an entry, in order.
        checkpoints: checkpoint folders by entry name.
        stopped_early: whether it was stopped (Ctrl-C) before its last step.
    """

    out_dir: Path
    request: RunRequest
    measurements: tuple[Measurement, ...]
    checkpoints: dict[str, Path]
    probe: ProbeReport | None = None
    stopped_early: bool = False


def launch(
    plan_paths: Sequence[str | Path],
    out_dir: str | Path,
    options: LaunchOptions | None = None,
    on_progress: Progress | None = None,
) -> RunResult:
    """Runs the plans in turns on this machine's processors and returns what they showed.

    Args:
        plan_paths: plan files; a file given twice measures the noise.
        out_dir: a new or empty folder for everything the run writes.
        options: see `LaunchOptions`.
        on_progress: called with each line of the progress file: a phase ("phase", "share")
            or a plan's step ("plan", "step", "steps", "loss", "tokens_per_s", "eta_s").

    Raises:
        InputError: the plans cannot run here, or their text cannot be used; nothing is left.
        RunFailedError: a rank failed; the folder keeps the logs.
    """
    out = Path(out_dir)
    chosen = options or LaunchOptions()
    request = check_request([Path(p) for p in plan_paths], out, chosen, find_machine())
    show = on_progress or (lambda _: None)
    if chosen.resume and (out / REQUEST_FILE).is_file():
        request = resumed_request(out, request)
        if not _finished(request, out):
            clear_last_end(out, request)
            _supervise(request, out, show, chosen.silence_s)
        return _read_result(request, out)
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    try:
        write_json(out / REQUEST_FILE, request.to_data())
        _supervise(request, out, show, chosen.silence_s)
    except InputError:
        if not (out / STEPS_FILE).exists():  # it never got to a step
            _clear(out, keep_folder=existed)
        raise
    return _read_result(request, out)


def _finished(request: RunRequest, out_dir: Path) -> bool:
    """Whether every plan has made all its steps and its results are written."""
    paths = [out_dir / measurement_file(entry.name) for entry in request.entries]
    if not all(path.is_file() for path in paths):
        return False
    done = [len(Measurement.model_validate(json.loads(p.read_text())).losses) for p in paths]
    return max(done) >= request.steps


def _supervise(
    request: RunRequest, out_dir: Path, on_progress: Progress, silence_s: float | None = None
) -> None:
    """Runs torchrun to its end."""
    world_size = request.entries[0].plan.parallel.world_size
    logs = out_dir / LOG_DIR
    command = torchrun_command(
        out_dir / REQUEST_FILE, nproc_per_node=world_size, log_dir=logs / "ranks"
    )
    logs.mkdir(exist_ok=True)
    with (logs / "torchrun.log").open("ab") as log, _stop_requests(out_dir, on_progress) as stop:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=rank_environment(os.environ, request.device),
            start_new_session=True,  # Ctrl-C is ours to handle: the ranks finish their round
            preexec_fn=die_with_parent,  # a run must not go on without who watches it
        )
        try:
            lines, heard = _follow(out_dir / PROGRESS_FILE), time.monotonic()
            while process.poll() is None:
                if _forward(lines, on_progress):
                    heard = time.monotonic()
                if stop.killed:
                    raise KeyboardInterrupt
                if silence_s is not None and time.monotonic() - heard > silence_s:
                    raise RunFailedError(f"the run showed no progress for {silence_s:g} s")
                time.sleep(_POLL_S)
            _forward(lines, on_progress)
        finally:
            _end(process)
    if process.returncode != 0:
        raise _failure(out_dir, process.returncode)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends torchrun and with it the ranks, if they still run."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(slots=True)
class _Stop:
    asked: bool = False
    killed: bool = False


@contextmanager
def _stop_requests(out_dir: Path, on_progress: Progress) -> Iterator[_Stop]:
    """Turns the first Ctrl-C (or SIGTERM) into a request to stop, the second into an end."""
    state = _Stop()
    if threading.current_thread() is not threading.main_thread():
        yield state
        return

    def handle(number: int, frame: FrameType | None) -> None:
        if state.asked:
            state.killed = True
            return
        state.asked = True
        (out_dir / STOP_FILE).touch()
        on_progress({"phase": STOPPING, "share": 0})

    before = {s: signal.signal(s, handle) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _follow(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yields the file's lines as they come, None where there is none at the moment."""
    position, rest = 0, b""
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(position)
                data = file.read()
            position += len(data)
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                yield json.loads(line)
        yield None


def _forward(lines: Iterator[dict[str, Any] | None], on_progress: Progress) -> bool:
    """Shows the lines that have come; returns whether there were any."""
    any_came = False
    for line in lines:
        if line is None:
            break
        on_progress(line)
        any_came = True
    return any_came


def _failure(out_dir: Path, exit_code: int) -> Exception:
    """Returns the error of the rank that failed first: the others fail because it is gone."""
    records = read_records(out_dir)
    if not records:
        return RunFailedError(
            f"the run ended with exit code {exit_code} before a rank could say why; "
            f"last lines of {out_dir / LOG_DIR}:\n{_log_tail(out_dir / LOG_DIR)}"
        )
    first = cause(records)
    if first["violations"]:
        return InputError([Violation(**v) for v in first["violations"]])
    return RunFailedError(
        f"{cause_text(first)}\n"
        f"its traceback is in {out_dir / ERROR_DIR}, all output in {out_dir / LOG_DIR}"
    )


def _log_tail(folder: Path) -> str:
    logs = sorted(folder.rglob("*.log"), key=lambda p: p.stat().st_mtime)
    lines = [
        line
        for log in logs
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    return "\n".join(lines[-_LOG_TAIL:])


def _clear(out_dir: Path, *, keep_folder: bool) -> None:
    """Removes what the run wrote into its folder, which was new or empty."""
    if not keep_folder:
        shutil.rmtree(out_dir, ignore_errors=True)
        return
    for path in out_dir.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _read_result(request: RunRequest, out_dir: Path) -> RunResult:
    probe = out_dir / PROBE_FILE
    names = [entry.name for entry in request.entries]
    measurements = tuple(
        Measurement.model_validate(json.loads((out_dir / measurement_file(n)).read_text()))
        for n in names
    )
    return RunResult(
        out_dir=out_dir,
        request=request,
        measurements=measurements,
        checkpoints={n: out_dir / checkpoint_dir(n) for n in names} if request.checkpoints else {},
        probe=ProbeReport.model_validate(json.loads(probe.read_text()))
        if probe.exists()
        else None,
        stopped_early=max(len(m.losses) for m in measurements) < request.steps,
    )
