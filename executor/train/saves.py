"""When a launch's plans are saved, and where they go on from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.load import checkpoint_tokenizer
from flopwright.executor.checkpoint.manifest import (
    check_hashes,
    read_manifest,
    step_folder,
)
from flopwright.executor.checkpoint.save import RunState, Saver
from flopwright.executor.data.batches import TOKENIZER_FILE
from flopwright.executor.launch.request import DATA_DIR, RunRequest, checkpoint_dir
from flopwright.executor.train.saved_state import load_state, own_state
from flopwright.executor.train.trial import Trial


class Saves:
    """The checkpoints of a launch's plans: every so many steps, and at the end."""

    def __init__(self, trials: Sequence[Trial], request: RunRequest, out_dir: Path) -> None:
        self._trials, self._request, self._out_dir = trials, request, out_dir
        self._savers: list[Saver] = [
            make_saver(trial, out_dir, request.keep_checkpoints) for trial in trials
        ]
        self._last = [request.resume_step] * len(trials)

    def after_turn(self, entry: int, steps: int) -> None:
        """Begins to save a plan after `steps` steps if that is due; collective."""
        every, saver = self._request.checkpoint_every, self._savers[entry]
        saver.check()
        if every is not None and steps // every > self._last[entry] // every:
            self._start(entry, steps)

    def finish(self, entry: int, steps: int) -> None:
        """Saves a plan's end, if that is asked for and not done; returns once it stands."""
        if self._request.checkpoints and self._last[entry] != steps:
            self._start(entry, steps)
        self._savers[entry].wait()
        self._savers[entry].barrier()

    def _start(self, entry: int, steps: int) -> None:
        saver, trial = self._savers[entry], self._trials[entry]
        start_save(saver, trial, self._out_dir / DATA_DIR, steps)
        self._last[entry] = steps


def go_on(trial: Trial, out_dir: Path, step: int) -> None:
    """Lets a trial go on from its plan's checkpoint of `step` in a run's folder; collective.

    Raises:
        InputError: the checkpoint is broken, or of another model or tokenizer.
    """
    go_on_from(trial, out_dir / checkpoint_dir(trial.entry.name) / step_folder(step), step)


def go_on_from(trial: Trial, where: Path, step: int | None = None) -> None:
    """Lets a trial go on from a step folder that any plan wrote; collective.

    Raises:
        InputError: the checkpoint is broken, or of another model, tokenizer or step.
    """
    manifest = read_manifest(where)
    check_hashes(manifest, where, trial.spec.content_hash(), trial.dataset.meta.tokenizer_hash)
    checkpoint_tokenizer(where, manifest)
    if step is not None and manifest.step != step:
        rule = f"the folder's name says step {step}"
        raise InputError(Violation(file=str(where), value=str(manifest.step), rule=rule))
    load_state(trial, where, manifest)


def make_saver(trial: Trial, out_dir: Path, keep: int = 2) -> Saver:
    """Returns what saves a plan's steps."""
    world = trial.groups.world
    return Saver(
        out_dir / checkpoint_dir(trial.entry.name),
        rank=dist.get_rank(),
        world_size=world.size,
        barrier=lambda: dist.barrier(group=world.handle),
        keep=keep,
    )


def start_save(saver: Saver, trial: Trial, data_dir: Path, steps: int) -> None:
    """Begins to save all that the trial goes on from after `steps` steps; collective."""
    slices, scalars = own_state(trial)
    run = RunState(
        step=steps,
        seed=trial.workload.seed,
        model=trial.spec,
        tokenizer_file=data_dir / TOKENIZER_FILE,
        plan=trial.plan.to_data(),
    )
    saver.start(slices, run, scalars)


def save_checkpoint(
    trial: Trial, out_dir: Path, data_dir: Path, steps: int, keep: int = 2
) -> Path:
    """Saves a trial and returns the step's folder, which stands on all ranks' return."""
    saver = make_saver(trial, out_dir, keep)
    start_save(saver, trial, data_dir, steps)
    saver.wait()
    saver.barrier()
    return saver.folder / step_folder(steps)
