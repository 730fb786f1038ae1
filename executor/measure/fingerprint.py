"""Where a number was measured: hardware and software, as far as a process can ask."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Final

import flopwright
from flopwright.executor.launch.machine import available_cores
from flopwright.report.metrics import Fingerprint

_PACKAGES: Final = ("torch", "deepspeed", "triton", "numpy")


def processor_name() -> str:
    """Returns the processor's model name, or its architecture where the system hides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def host_memory_bytes() -> int:
    """Returns the machine's physical memory in bytes."""
    return int(os.sysconf("SC_PAGE_SIZE")) * int(os.sysconf("SC_PHYS_PAGES"))


def fingerprint(world_size: int, device_kind: str = "cpu") -> Fingerprint:
    """Returns the fingerprint of this machine for a run of `world_size` ranks.

    It names the kind of machine, not the host: equal machines share calibrations.

    Args:
        world_size: ranks of the run.
        device_kind: "cuda" asks torch for the GPU's name; "cpu" asks nothing of it.
    """
    gpu, threads = None, int(os.environ.get("OMP_NUM_THREADS") or available_cores())
    if device_kind == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    return Fingerprint(
        machine=f"{platform.system()} {platform.machine()}",
        processor=processor_name(),
        num_cores=available_cores(),
        world_size=world_size,
        threads_per_rank=threads,
        memory_bytes=host_memory_bytes(),
        gpu=gpu,
        python=platform.python_version(),
        packages=_versions(),
        tool_version=flopwright.__version__,
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
