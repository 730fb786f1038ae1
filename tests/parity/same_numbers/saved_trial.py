"""A trial's checkpoint, written while the caller waits."""

from __future__ import annotations

from pathlib import Path

from flopwright.executor.checkpoint.manifest import step_folder
from flopwright.executor.train.saves import make_saver, start_save
from flopwright.executor.train.trial import Trial


def save_checkpoint(trial: Trial, out_dir: Path, data_dir: Path, steps: int) -> Path:
    """Saves a trial and returns the step's folder, which stands on all ranks' return."""
    saver = make_saver(trial, out_dir)
    start_save(saver, trial, data_dir, steps)
    saver.wait()
    saver.barrier()
    return saver.folder / step_folder(steps)
