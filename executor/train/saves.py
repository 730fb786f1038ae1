"""When a launch's plans are saved, and where they go on from."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from flopwright.errors import InputError, Violation
from flopwright.executor.checkpoint.load import checkpoint_tokenizer, load_full
from flopwright.executor.checkpoint.manifest import (
    Manifest,
    check_hashes,
    find_checkpoint,
    read_manifest,
    step_folder,
)
from flopwright.executor.checkpoint.save import RunState, Saver, prune
from flopwright.executor.data.batches import TOKENIZER_FILE
from flopwright.executor.launch.request import DATA_DIR, RunRequest, checkpoint_dir, hf_dir
from flopwright.executor.train.guard import not_finite, unsavable
from flopwright.executor.train.saved_state import load_state, own_state
from flopwright.executor.train.trial import Trial
from flopwright.models.hf.write import write_checkpoint
from flopwright.spec.model import ModelSpec


class Saves:
    """The checkpoints of a launch's plans: every so many steps, and at the end.

    Args:
        state_of: what a checkpoint of a plan (by number) keeps beside tensors.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        request: RunRequest,
        out_dir: Path,
        state_of: Callable[[int], dict[str, Any]] = lambda _: {},
    ) -> None:
        self._trials, self._request, self._out_dir = trials, request, out_dir
        self._state_of = state_of
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

    def at_end(self, entry: int, steps: int) -> None:
        """Begins to save a plan's end, if that is asked for and not done; collective."""
        if self._request.checkpoints and self._last[entry] != steps:
            # one more stays until all is written: what is not would be made from it again
            self._savers[entry].keep = self._request.keep_checkpoints + 1
            self._start(entry, steps)

    def settle(self, entry: int) -> None:
        """Returns once a plan's last save stands on all ranks; collective."""
        self._savers[entry].wait()
        self._savers[entry].barrier()

    def ended(self, entry: int) -> None:
        """Removes what need not stay once a plan's end is written; one rank calls it."""
        folder = self._out_dir / checkpoint_dir(self._trials[entry].entry.name)
        prune(folder, self._request.keep_checkpoints)

    def went_back(self, entry: int, steps: int) -> None:
        """Takes note that a plan goes on from an earlier checkpoint."""
        self._last[entry] = steps

    def _start(self, entry: int, steps: int) -> None:
        saver, trial = self._savers[entry], self._trials[entry]
        request = self._request
        if request.checkpoint_every is not None and (found := not_finite(trial)):
            if request.max_rollbacks and steps < request.steps:
                return  # the next loss shows it, and leads back
            raise unsavable(trial, found, steps)
        state = self._state_of(entry)
        start_save(saver, trial, self._out_dir / DATA_DIR, steps, state)
        self._last[entry] = steps


def go_on(trial: Trial, out_dir: Path, step: int) -> Manifest:
    """Lets a trial go on from its plan's checkpoint of `step` in a run's folder; collective.

    Returns the checkpoint's record.

    Raises:
        InputError: the checkpoint is broken, or of another model, tokenizer or step.
    """
    where = out_dir / checkpoint_dir(trial.entry.name) / step_folder(step)
    manifest = read_manifest(where)
    check_hashes(manifest, where, trial.spec.content_hash(), trial.dataset.meta.tokenizer_hash)
    if manifest.step != step:
        rule = f"the folder's name says step {step}"
        raise InputError(Violation(file=str(where), value=str(manifest.step), rule=rule))
    checkpoint_tokenizer(where, manifest)
    load_state(trial, where, manifest)
    return manifest


def begin_with(trial: Trial, where: Path) -> None:
    """Lets a trial begin with what another run ended with, whatever its plan; collective.

    The scaling of positions may be another one: no weight knows of it.

    Raises:
        InputError: the checkpoint is broken, or of another model or tokenizer.
    """
    manifest = read_manifest(where)
    check_hashes(manifest, where, None, trial.dataset.meta.tokenizer_hash)
    theirs, mine = _unscaled(manifest.model), _unscaled(trial.spec)
    if theirs != mine:
        rule = f"the checkpoint is of {theirs.name}, with other tensors than {mine.name}"
        raise InputError(Violation(file=str(where), field="model", rule=rule))
    checkpoint_tokenizer(where, manifest)
    load_state(trial, where, manifest)


def export_hf(trial: Trial, out_dir: Path) -> None:
    """Writes the weights of a plan's last checkpoint as config.json, shards and tokenizer.json.

    Called by one rank. What an earlier end of the same run wrote is replaced.
    """
    source = find_checkpoint(out_dir / checkpoint_dir(trial.entry.name))
    target = out_dir / hf_dir(trial.entry.name)
    weights, manifest = load_full(source)
    tied = trial.spec.tied_embeddings
    shutil.rmtree(target, ignore_errors=True)
    write_checkpoint(
        target,
        manifest.model,
        ((n, w) for n, w in weights.items() if not (tied and n == "lm_head.weight")),
    )
    shutil.copyfile(source / TOKENIZER_FILE, target / TOKENIZER_FILE)


def _unscaled(model: ModelSpec) -> ModelSpec:
    """Returns the model with plain positions."""
    if model.attention.rope is None:
        return model
    rope = model.attention.rope.model_copy(update={"scaling": None})
    attention = model.attention.model_copy(update={"rope": rope})
    return model.model_copy(update={"attention": attention})


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


def start_save(
    saver: Saver,
    trial: Trial,
    data_dir: Path,
    steps: int,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Begins to save all that the trial goes on from after `steps` steps; collective."""
    slices, scalars = own_state(trial)
    run = RunState(
        step=steps,
        seed=trial.workload.seed,
        model=trial.spec,
        tokenizer_file=data_dir / TOKENIZER_FILE,
        plan=trial.plan.to_data(),
        state=dict(state or {}),
    )
    saver.start(slices, run, scalars)
