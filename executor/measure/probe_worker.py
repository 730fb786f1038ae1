"""One rank of `flopwright probe`; torchrun or srun starts it with the path of a ProbeRequest.

By hand, on several machines that see one folder:

    flopwright probe --out machine --prepare
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d \\
        -m flopwright.executor.measure.probe_worker machine/request.json
    flopwright probe --out machine --read
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from flopwright.executor.measure.probe import ProbeOptions, run_probe
from flopwright.executor.measure.probe_request import (
    JOURNAL_FILE,
    PROGRESS_PREFIX,
    REPORT_FILE,
    ProbeRequest,
    torchrun_words,
)


def main(path: Path) -> None:
    """Measures with all ranks and writes the report beside the request, on rank 0."""
    request = ProbeRequest.model_validate_json(path.read_bytes())
    os.environ.update(torchrun_words(os.environ))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if request.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if request.device == "cuda" else "gloo")
    folder = path.parent
    options = ProbeOptions(
        budget_s=request.budget_s, journal=folder / JOURNAL_FILE, storage=folder
    )
    try:
        report = run_probe(device, request.plans, progress=_tell, options=options)
        if dist.get_rank() == 0:
            temporary = folder / f".{REPORT_FILE}.tmp"
            temporary.write_text(report.model_dump_json(exclude_none=True, indent=1), "utf-8")
            temporary.replace(folder / REPORT_FILE)
            (folder / JOURNAL_FILE).unlink(missing_ok=True)
    finally:
        dist.destroy_process_group()


def _tell(what: str) -> None:
    sys.stdout.write(f"{PROGRESS_PREFIX}{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
