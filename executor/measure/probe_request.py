"""What `flopwright probe` asks of its ranks: a file that both sides read. Imports no torch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import PositiveFloat

from flopwright.errors import InputError, Violation
from flopwright.executor.launch.commands import rank_environment
from flopwright.plan.file import PlanFile
from flopwright.report.probe import ProbeReport
from flopwright.spec.base import Spec

WORKER_MODULE: Final = "flopwright.executor.measure.probe_worker"
REPORT_FILE: Final = "probe.json"
REQUEST_FILE: Final = "request.json"
JOURNAL_FILE: Final = "probe.journal.jsonl"
PROGRESS_PREFIX: Final = "probe: "
_TAIL_LINES: Final = 12


class ProbeRequest(Spec):
    """One probe: on what, of which plans' shapes, for how long."""

    device: Literal["cpu", "cuda"]
    plans: tuple[PlanFile, ...] = ()
    budget_s: PositiveFloat = 60.0


def torchrun_words(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns what torchrun would have set where srun started the ranks; nothing elsewhere.

    srun says SLURM_*; where the ranks meet (MASTER_ADDR) is the job script's to say.
    """
    if "RANK" in environment or "SLURM_PROCID" not in environment:
        return {}
    tasks = int(environment["SLURM_NTASKS"])
    nodes = int(environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1")))
    return {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "MASTER_PORT": environment.get("MASTER_PORT", "29500"),
    }


def write_request(request: ProbeRequest, folder: Path) -> Path:
    """Writes what the ranks are asked into their folder and returns where."""
    path = folder / REQUEST_FILE
    path.write_text(request.model_dump_json(by_alias=True, exclude_none=True), encoding="utf-8")
    return path


def run_probe_ranks(
    request: ProbeRequest, nproc: int, folder: Path, on_progress: Callable[[str], None]
) -> ProbeReport:
    """Starts `nproc` ranks with torchrun, waits for them and returns what they measured.

    Args:
        request: what to measure.
        nproc: ranks on this machine.
        folder: an existing folder for the request, the report and the journal, from which
            a probe that was ended goes on.
        on_progress: called with what is measured next.

    Raises:
        InputError: a rank failed; the message ends with its last lines.
    """
    path = write_request(request, folder)
    command = (
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1",
        "--nnodes=1", f"--nproc-per-node={nproc}", "--max-restarts=0", "-m", WORKER_MODULE,
        str(path),
    )  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=rank_environment(os.environ, request.device),
    )
    lines: list[str] = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(PROGRESS_PREFIX):
                on_progress(line.removeprefix(PROGRESS_PREFIX).rstrip())
            else:
                lines.append(line.rstrip())
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if code != 0:
        tail = "\n".join(lines[-_TAIL_LINES:])
        raise InputError(
            Violation(rule=f"the probe's ranks ended with code {code}; their last lines:\n{tail}")
        )
    return ProbeReport.model_validate_json((folder / REPORT_FILE).read_bytes())
