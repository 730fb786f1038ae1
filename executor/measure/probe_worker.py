"""One rank of `flopwright probe`; torchrun starts it with the path of a ProbeRequest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flopwright.executor.measure.probe import run_probe
from flopwright.executor.measure.probe_request import (
    PROGRESS_PREFIX,
    REPORT_FILE,
    ProbeRequest,
)


def main(path: Path) -> None:
    """Measures with all ranks and writes the report beside the request, on rank 0."""
    request = ProbeRequest.model_validate_json(path.read_bytes())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if request.device == "cuda" else "gloo")
    try:
        report = run_probe(device, request.plans, budget_s=request.budget_s, progress=_tell)
        if dist.get_rank() == 0:
            (path.parent / REPORT_FILE).write_text(report.model_dump_json(), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _tell(what: str) -> None:
    sys.stdout.write(f"{PROGRESS_PREFIX}{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
