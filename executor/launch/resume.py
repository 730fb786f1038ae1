"""Where a run's folder can be gone on from, and what of it is then undone. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.manifest import step_folder, steps_of
from flopwright.executor.launch.request import (
    ERROR_DIR,
    PROGRESS_FILE,
    REQUEST_FILE,
    ROUNDS_FILE,
    STEPS_FILE,
    STOP_FILE,
    STOP_NOW_FILE,
    STOPPED_FILE,
    RunRequest,
    checkpoint_dir,
    measurement_file,
    read_request,
    write_json,
)
from flopwright.report.metrics import Measurement


def resume_step(out_dir: Path, request: RunRequest) -> int:
    """Returns the last step before the end that every plan's checkpoints have; 0 for none."""
    found: set[int] | None = None
    for entry in request.entries:
        steps = set(steps_of(out_dir / checkpoint_dir(entry.name)))
        found = steps if found is None else found & steps
    return max((s for s in found or () if s < request.steps), default=0)


def resumed_request(out_dir: Path, request: RunRequest) -> RunRequest:
    """Returns the request under which a folder's run goes on, its results under their names.

    The plans and the number of ranks may be others than before; what is trained may not.

    Raises:
        InputError: the folder's run trains something else.
    """
    path = out_dir / REQUEST_FILE
    before = read_request(path)
    same = len(before.entries) == len(request.entries)
    if same:
        entries = [
            new.model_copy(update={"name": old.name})
            for new, old in zip(request.entries, before.entries, strict=True)
        ]
        request = request.model_copy(update={"entries": tuple(entries)})
    differs = [] if same else [("plans", len(before.entries), len(request.entries))]
    differs += [
        (name, old, new) for name, old, new in _told(before, request) if same and old != new
    ]
    if differs:
        raise InputError(
            Violation(
                file=str(path),
                field=name,
                value=str(new),
                rule=f"the run in this folder was started with {old}",
                nearest_fix="resume it with the same, or choose another folder",
            )
            for name, old, new in differs
        )
    return request.model_copy(update={"resume_step": resume_step(out_dir, request)})


def _told(before: RunRequest, now: RunRequest) -> list[tuple[str, Any, Any]]:
    """Returns what must not change, by name: before and now."""
    kept = ("seed", "text", "tokenizer", "stream")
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(before, name), getattr(now, name)) for name in kept
    ]
    for old, new in zip(before.entries, now.entries, strict=True):
        a, b = old.plan.scenario, new.plan.scenario
        pairs.append(("model", a.model.content_hash(), b.model.content_hash()))
        pairs.append(("workload", a.workload.content_hash(), b.workload.content_hash()))
    return pairs


def is_done(request: RunRequest, out_dir: Path) -> bool:
    """Whether every plan has made all its steps and its results are written."""
    paths = [out_dir / measurement_file(entry.name) for entry in request.entries]
    if not all(path.is_file() for path in paths):
        return False
    done = [len(Measurement.model_validate(json.loads(p.read_text())).losses) for p in paths]
    return max(done) >= request.steps


def clear_last_end(out_dir: Path, request: RunRequest) -> None:
    """Takes away how a folder's run ended, and writes how it goes on."""
    for name in (PROGRESS_FILE, STOP_FILE, STOP_NOW_FILE, STOPPED_FILE):
        (out_dir / name).unlink(missing_ok=True)
    shutil.rmtree(out_dir / ERROR_DIR, ignore_errors=True)
    write_json(out_dir / REQUEST_FILE, request.to_data())


def undo_after(out_dir: Path, request: RunRequest) -> None:
    """Takes back what a folder records of steps behind the one it is gone on from."""
    cut_records(out_dir, request.resume_step, request.steps_per_round)


def remake_end(out_dir: Path, request: RunRequest) -> None:
    """Takes back the last checkpoint of a run that ended before its results were written.

    It is made again, and would else be taken for newer than those on the way there.
    """
    for entry in request.entries:
        folder = out_dir / checkpoint_dir(entry.name) / step_folder(request.steps)
        if folder.is_dir():
            gone = folder.with_name(f".tmp-old-{folder.name}")
            folder.rename(gone)
            shutil.rmtree(gone)


def cut_records(out_dir: Path, step: int, steps_per_round: int) -> None:
    """Takes back what a folder records of step `step` (0-based) and those after it."""
    round_ = -(-step // steps_per_round)  # a stop may have cut a round short
    _keep_lines(out_dir / STEPS_FILE, lambda line: line["step"] < step)
    _keep_lines(out_dir / ROUNDS_FILE, lambda line: line["round"] < round_)


def recorded_losses(out_dir: Path, names: Sequence[str]) -> dict[str, list[float]]:
    """Returns the losses that a folder has of each plan, by step."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for line in _lines(out_dir / STEPS_FILE):
        found[line["plan"]].append(line["loss"])
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the lines that are whole; a kill may have cut the last one."""
    if not path.is_file():
        return []
    found = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:
            break
    return found


def _keep_lines(path: Path, keep: Any) -> None:
    if path.is_file():
        text = "".join(json.dumps(line) + "\n" for line in _lines(path) if keep(line))
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
