"""Writing a checkpoint: every rank its own boxes, and the whole folder at once or not at all.

A save begins with copies of what is written; the files are written beside the training. The
folder's name appears by one rename, once every rank's file and the manifest are on disk.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor

import flopwright
from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.boxes import TensorSlice, whole
from flopwright.executor.checkpoint.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    FileEntry,
    Manifest,
    file_sha256,
    manifest_text,
    step_folder,
    steps_of,
)
from flopwright.executor.checkpoint.storage import record_path, sync, write_slices
from flopwright.executor.data.tokenizer import load_tokenizer, tokenizer_hash
from flopwright.spec.model import ModelSpec

_TEMPORARY: Final = ".tmp-"
_LOOK_S: Final = 0.02
# How long rank 0 waits for the others' files, which may be large.
COMMIT_TIMEOUT_S: Final = 3600.0
Tensors = Mapping[str, Tensor | TensorSlice | Sequence[TensorSlice]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a checkpoint records beside tensors.

    Attributes:
        step: optimizer steps done.
        seed: of the run.
        tokenizer_file: the run's tokenizer.json; copied into the checkpoint.
        plan: the parallel plan's data.
        state: plain data that JSON can hold, which the run goes on from.
    """

    step: int
    seed: int
    model: ModelSpec
    tokenizer_file: Path
    plan: dict[str, Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Saver:
    """Saves steps of a run, one at a time, beside the training.

    Every rank calls `start` and `wait` alike, on a file system that all of them share. A kill
    at any moment leaves the earlier checkpoints as they were.

    Attributes:
        folder: the run's checkpoint folder.
        rank: this process, of `world_size`.
        barrier: waits for all of them.
        keep: steps that stay; older ones are removed after a new one stands.
    """

    folder: Path
    rank: int = 0
    world_size: int = 1
    barrier: Callable[[], object] = lambda: None
    keep: int = 2
    _thread: threading.Thread | None = None
    _error: Exception | None = None

    def start(self, tensors: Tensors, run: RunState, scalars: Mapping[str, float]) -> None:
        """Begins to save a step; returns once this rank's tensors have been copied.

        Args:
            tensors: this rank's part, no element of which another rank saves too.
            run: what all ranks agree on.
            scalars: single numbers by name.

        Raises:
            InputError: the folder cannot be written, or the save before this one failed.
        """
        self.wait()
        temporary = self.folder / f"{_TEMPORARY}{step_folder(run.step)}"
        if self.rank == 0:
            with _named(temporary, run.step, self.rank):
                self.folder.mkdir(parents=True, exist_ok=True)
                for left_over in self.folder.glob(f"{_TEMPORARY}*"):
                    shutil.rmtree(left_over)
                temporary.mkdir()
        self.barrier()
        copies = {name: [_copied(s) for s in _slices(value)] for name, value in tensors.items()}
        self._thread = threading.Thread(
            target=self._save,
            args=(temporary, copies, run, dict(scalars)),
            name="checkpoint",
            daemon=True,  # a rank that fails ends, and with it a save that is not done
        )
        self._thread.start()

    def check(self) -> None:
        """Raises what has gone wrong with a save so far."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> None:
        """Returns once this rank's part of the save stands; rank 0's is the last.

        Raises:
            InputError: it could not be written.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _save(
        self,
        temporary: Path,
        slices: dict[str, list[TensorSlice]],
        run: RunState,
        scalars: dict[str, float],
    ) -> None:
        try:
            with _named(temporary, run.step, self.rank):
                write_slices(_file(temporary, self.rank), slices, scalars)
                if self.rank == 0:
                    files = _records(temporary, self.world_size, COMMIT_TIMEOUT_S)
                    commit(temporary, self.folder / step_folder(run.step), run, files)
                    prune(self.folder, self.keep)
        except Exception as error:  # told by the training's thread
            self._error = error
            shutil.rmtree(temporary, ignore_errors=True)


def save(
    folder: Path,
    tensors: Tensors,
    run: RunState,
    scalars: Mapping[str, float] | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] = lambda: None,
    keep: int = 2,
) -> Path:
    """Writes one step's checkpoint and returns its folder, `folder/step-NNNNNNNN`.

    As `Saver`, but every rank returns once the whole of it stands.
    """
    saver = Saver(folder, rank, world_size, barrier, keep)
    saver.start(tensors, run, scalars or {})
    saver.wait()
    barrier()
    return folder / step_folder(run.step)


def commit(temporary: Path, target: Path, run: RunState, files: Sequence[FileEntry]) -> None:
    """Writes the manifest over all ranks' records and gives the folder its name."""
    shutil.copyfile(run.tokenizer_file, temporary / TOKENIZER_FILE)
    manifest = Manifest(
        tool_version=flopwright.__version__,
        step=run.step,
        seed=run.seed,
        model=run.model,
        model_hash=run.model.content_hash(),
        tokenizer_hash=tokenizer_hash(load_tokenizer(run.tokenizer_file)),
        tokenizer_sha256=file_sha256(temporary / TOKENIZER_FILE),
        plan=run.plan,
        world_size=len(files),
        state=run.state,
        files=tuple(files),
    )
    (temporary / MANIFEST_FILE).write_text(manifest_text(manifest), encoding="utf-8")
    for path in (temporary / TOKENIZER_FILE, temporary / MANIFEST_FILE, temporary):
        sync(path)
    replaced = target.with_name(f"{_TEMPORARY}replaced-{target.name}")
    if target.exists():  # the same step saved again
        target.rename(replaced)
    temporary.rename(target)
    sync(target.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def prune(folder: Path, keep: int) -> None:
    """Removes all but the last `keep` steps; each of them vanishes at once."""
    for step in steps_of(folder)[: -max(1, keep)]:
        _remove(folder, step)


def discard_after(folder: Path, step: int) -> None:
    """Removes the steps after `step`, the last first; each of them vanishes at once."""
    for later in reversed([s for s in steps_of(folder) if s > step]):
        _remove(folder, later)


def _remove(folder: Path, step: int) -> None:
    gone = folder / f"{_TEMPORARY}old-{step_folder(step)}"
    (folder / step_folder(step)).rename(gone)
    shutil.rmtree(gone)


def _slices(value: Tensor | TensorSlice | Sequence[TensorSlice]) -> Sequence[TensorSlice]:
    if isinstance(value, Tensor):
        return (whole(value),)
    return (value,) if isinstance(value, TensorSlice) else value


def _copied(box: TensorSlice) -> TensorSlice:
    """Returns the box with a copy on the host, which the next step does not change."""
    copy = box.tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return TensorSlice(copy, box.full_shape, box.offsets)


def _file(temporary: Path, rank: int) -> Path:
    return temporary / f"rank-{rank:05d}.safetensors"


def _records(temporary: Path, world_size: int, limit_s: float) -> list[FileEntry]:
    """Returns all ranks' records once they are there, and takes them out of the folder.

    Raises:
        InputError: one is not there within the limit.
    """
    found, until = [], time.monotonic() + limit_s
    for rank in range(world_size):
        path = record_path(_file(temporary, rank))
        while not path.is_file():
            if time.monotonic() > until or not temporary.is_dir():
                raise InputError(
                    Violation(
                        file=str(path),
                        rule="this rank's part is not visible to rank 0",
                        nearest_fix="write checkpoints to a file system that all nodes share",
                    )
                )
            time.sleep(_LOOK_S)
        found.append(FileEntry.model_validate_json(path.read_bytes()))
    for rank in range(world_size):
        record_path(_file(temporary, rank)).unlink()
    return found


class _named:  # noqa: N801  (reads as a statement)
    """Says which rank and step could not be saved, and why."""

    def __init__(self, path: Path, step: int, rank: int) -> None:
        self._path, self._what = path, f"rank {rank} could not save step {step}"

    def __enter__(self) -> None:
        """Begins."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Turns what the file system said into an input error."""
        if isinstance(error, OSError | SafetensorError):
            why = getattr(error, "strerror", None) or str(error)
            raise InputError(
                Violation(
                    file=str(self._path),
                    rule=f"{self._what}: {why}",
                    nearest_fix="make room or allow writing, then resume: "
                    "earlier checkpoints are as they were",
                )
            ) from error
