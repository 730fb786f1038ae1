"""Starts a run on this machine, watches over it and reads what it wrote. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flopwright.errors import InputError, Violation
from flopwright.executor.launch.checks import LaunchOptions, check_request
from flopwright.executor.launch.commands import rank_environment, torchrun_command
from flopwright.executor.launch.failure import (
    cause,
    cause_text,
    first_to_end,
    how_it_ended,
    last_seen,
    no_place_to_write,
    read_records,
)
from flopwright.executor.launch.lock import alone_in
from flopwright.executor.launch.machine import find_machine
from flopwright.executor.launch.processes import end_torchrun, start_torchrun, stop_requests
from flopwright.executor.launch.progress import Progress
from flopwright.executor.launch.request import (
    ERROR_DIR,
    LOG_DIR,
    PROBE_FILE,
    PROGRESS_FILE,
    REQUEST_FILE,
    STEPS_FILE,
    STOPPED_FILE,
    RunRequest,
    checkpoint_dir,
    measurement_file,
    write_json,
)
from flopwright.executor.launch.resume import clear_last_end, is_done, resumed_request
from flopwright.executor.launch.stopped import stopped_text
from flopwright.report.metrics import Measurement
from flopwright.report.probe import ProbeReport

_POLL_S: Final = 0.2
_LOG_TAIL: Final = 15
_TORCHRUN_LOG: Final = "torchrun.log"


class RunFailedError(Exception):
    """A run that started and did not end well: which rank, why, and where its log is."""


class RunStoppedError(Exception):
    """A run that was told to end (SIGTERM) and has saved itself: who was told, and where it is."""


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
        RunStoppedError: it was told to end, and has saved itself.
    """
    out = Path(out_dir)
    chosen = options or LaunchOptions()
    request = check_request([Path(p) for p in plan_paths], out, chosen, find_machine())
    try:
        return _launched(request, out, chosen, on_progress or (lambda _: None))
    except OSError as error:
        refusal = no_place_to_write(error, "the launcher")
        if refusal is None:
            raise
        raise refusal from error


def _launched(request: RunRequest, out: Path, chosen: LaunchOptions, show: Progress) -> RunResult:
    """Starts a checked request, or goes on with the folder's run, and returns what it showed."""
    existed = out.exists()
    out.mkdir(parents=True, exist_ok=True)
    with alone_in(out):
        if chosen.resume and (out / REQUEST_FILE).is_file():
            request = resumed_request(out, request)
            if not is_done(request, out):
                clear_last_end(out, request)
                _supervise(request, out, show, chosen.silence_s)
            return _read_result(request, out)
        try:
            write_json(out / REQUEST_FILE, request.to_data())
            _supervise(request, out, show, chosen.silence_s)
        except InputError:
            if not (out / STEPS_FILE).exists():  # it never got to a step
                _clear(out, keep_folder=existed)
            raise
        return _read_result(request, out)


def _supervise(
    request: RunRequest, out_dir: Path, on_progress: Progress, silence_s: float | None = None
) -> None:
    """Runs torchrun to its end.

    Raises:
        RunStoppedError: the ranks were told to end before their last step, and have saved.
        RunFailedError, InputError: a rank failed, or could not use what it was given.
    """
    world_size = request.entries[0].plan.parallel.world_size
    logs = out_dir / LOG_DIR
    command = torchrun_command(
        out_dir / REQUEST_FILE, nproc_per_node=world_size, log_dir=logs / "ranks"
    )
    logs.mkdir(exist_ok=True)
    with (
        (logs / _TORCHRUN_LOG).open("ab") as log,
        stop_requests(out_dir, on_progress, saves=request.checkpoints) as stop,
    ):
        begun = log.tell()  # what stands before it is of earlier starts
        process = start_torchrun(command, rank_environment(os.environ, request.device), log)
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
            end_torchrun(process)
    if process.returncode != 0:
        failure = _failure(out_dir, process.returncode, begun)
        if stop.asked and request.checkpoints:
            text = f"told to end, it could not save first: {failure}"
            raise RunStoppedError(text) from failure
        raise failure
    if (out_dir / STOPPED_FILE).is_file():
        record = json.loads((out_dir / STOPPED_FILE).read_text(encoding="utf-8"))
        raise RunStoppedError(stopped_text(record, out_dir))


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


def _failure(out_dir: Path, exit_code: int, log_begin: int) -> Exception:
    """Returns the error of the rank that failed first: the others fail because it is gone."""
    records, seen, logs = read_records(out_dir), last_seen(out_dir), out_dir / LOG_DIR
    report = (logs / _TORCHRUN_LOG).read_bytes()[log_begin:].decode(errors="replace")
    gone = first_to_end(report)
    if not records:
        who = gone or f"torchrun {how_it_ended(exit_code)}"
        return RunFailedError(
            f"{who} before a rank could say why{seen}; last lines of {logs}:\n{_log_tail(logs)}"
        )
    first = cause(records)
    if first["violations"]:
        return InputError([Violation(**v) for v in first["violations"]])
    return RunFailedError(
        f"{cause_text(first, seen, gone)}\n"
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
