"""predicted.trace.json.gz: the simulated step as a timeline that Perfetto and HTA open."""

from __future__ import annotations

import tempfile
from pathlib import Path

from flopwright.plan.file import PlanFile
from flopwright.report.trace import Trace, write_chrome_trace


def predicted_trace(plan: PlanFile, trace: Trace) -> bytes:
    """Returns the gzipped Chrome trace; the same trace gives the same bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "predicted.trace.json.gz"
        write_chrome_trace(path, trace, world_size=plan.parallel.world_size)
        return path.read_bytes()
