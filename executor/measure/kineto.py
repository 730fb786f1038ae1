"""A Kineto trace of one step on request: every operator and kernel, one file a rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def kineto_trace(path: Path, device: torch.device) -> Iterator[None]:
    """Records what runs inside with torch's profiler and writes it as Chrome JSON to `path`.

    The step inside takes longer than others: it is none to time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as recorded:
        yield
    temporary = path.with_name(f".{path.name}")
    recorded.export_chrome_trace(str(temporary))
    temporary.replace(path)
