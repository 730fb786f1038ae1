"""What this machine has to run ranks on, asked without torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

_DIE_WITH_PARENT: Final = 1  # PR_SET_PDEATHSIG of prctl(2)


@dataclass(frozen=True, slots=True)
class Machine:
    """Cores this process may use, and CUDA GPUs."""

    cores: int
    gpus: int

    @property
    def device_kind(self) -> str:
        """ "cuda" where there is a GPU, else "cpu"."""
        return "cuda" if self.gpus else "cpu"

    def describe(self) -> str:
        """Returns what was found, for messages."""
        return f"{self.gpus} CUDA GPUs" if self.gpus else f"{self.cores} CPU cores, no GPU"


def die_with_parent() -> None:
    """Lets the kernel end this process when its parent is gone (Linux), so none is left over."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)


def available_cores() -> int:
    """Returns the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def find_machine() -> Machine:
    """Returns what this machine has."""
    return Machine(cores=available_cores(), gpus=_count_gpus())


def _count_gpus() -> int:
    """Returns the GPUs that the driver's tool lists, within CUDA_VISIBLE_DEVICES."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return found
    return min(found, len([v for v in visible.split(",") if v.strip() not in {"", "-1"}]))
