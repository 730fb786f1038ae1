"""Checkpoint I/O: what all ranks together write to and read from a folder."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch

from flopwright.executor.measure.probe_timing import Ranks
from flopwright.report.probe import ProbePart, StoragePoint

_NBYTES: Final = 32 * 2**20


def storage_points(folder: Path, ranks: Ranks, nbytes: int = _NBYTES) -> ProbePart:
    """Returns the seconds in which every rank writes `nbytes` as a checkpoint, and reads them.

    Written means that the disk has it (fsync). What was just written is read from memory where
    the system keeps it, as a run that resumes on the same machine would.
    """
    # Not at the top: a probe of operators alone does not need it.
    from safetensors.torch import load_file, save_file

    # Other ranks may stand on other machines: each has a name of its own.
    path = folder / f".flopwright-probe-{ranks.rank}-{secrets.token_hex(4)}.safetensors"
    tensor = {"weight": torch.ones(nbytes // 4)}
    try:
        ranks.together()
        begin = time.perf_counter()
        save_file(tensor, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        write_s = _slowest(ranks, time.perf_counter() - begin)
        ranks.together()
        begin = time.perf_counter()
        load_file(path)["weight"].sum()  # the file is mapped: only what is touched is read
        read_s = _slowest(ranks, time.perf_counter() - begin)
    finally:
        path.unlink(missing_ok=True)
    return ProbePart(
        storage=(
            StoragePoint(what="write", ranks=ranks.size, nbytes=nbytes, seconds=write_s),
            StoragePoint(what="read", ranks=ranks.size, nbytes=nbytes, seconds=read_s),
        )
    )


def _slowest(ranks: Ranks, seconds: float) -> float:
    return float(ranks.gather(np.array([seconds])).max())
