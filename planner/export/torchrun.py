"""The torchrun command of a plan, as an argument list and as a script."""

from __future__ import annotations

import shlex
from typing import Final

from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import (
    PLAN_FILE,
    RENDEZVOUS_PORT,
    header,
    placement,
    slug,
)

WORKER_MODULE: Final = "flopwright.executor.train.worker"
RUN_FOLDER: Final = "run"


def torchrun_arguments(plan: PlanFile, *, endpoint: str = "") -> tuple[str, ...]:
    """Returns the arguments of torchrun up to and including the module it starts.

    Args:
        endpoint: host:port of the rendezvous; by default the present machine on any free
            port for one node, and `localhost:29500` for several.
    """
    where = placement(plan)
    if not endpoint:
        endpoint = "localhost:0" if where.nodes == 1 else f"localhost:{RENDEZVOUS_PORT}"
    return (
        f"--nnodes={where.nodes}",
        f"--nproc-per-node={where.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={slug(plan.name)}",
        f"--rdzv-endpoint={endpoint}",
        "--max-restarts=0",
        "--tee=3",
        f"--log-dir={RUN_FOLDER}/log",
        "--local-ranks-filter=0",
        "-m",
        WORKER_MODULE,
    )


def program_arguments() -> tuple[str, ...]:
    """Returns what follows the module: the worker's own arguments."""
    return ("--plan", PLAN_FILE, "--out", RUN_FOLDER)


def command(plan: PlanFile) -> str:
    """Returns the whole command on one line, paste-able in the bundle's folder on one node."""
    return shlex.join(["torchrun", *torchrun_arguments(plan), *program_arguments()])


def torchrun_script(plan: PlanFile) -> str:
    """Returns torchrun.sh: one node pastes it as it is, several set RDZV_ENDPOINT first."""
    where = placement(plan)
    arguments = [
        f'--rdzv-endpoint="${{RDZV_ENDPOINT:-{a.partition("=")[2]}}}"'
        if a.startswith("--rdzv-endpoint=")
        else shlex.quote(a)
        for a in torchrun_arguments(plan)
    ]
    several = (
        f"# Run it on each of the {where.nodes} nodes, with RDZV_ENDPOINT=<first node>:"
        f"{RENDEZVOUS_PORT}.\n"
        if where.nodes > 1
        else ""
    )
    program = shlex.join(program_arguments())
    return (
        "#!/usr/bin/env bash\n"
        + header(plan, "torchrun")
        + several
        + "# More arguments are handed to the training program: ./torchrun.sh --text FOLDER\n"
        + "set -euo pipefail\n"
        + 'cd "$(dirname "$0")"\n'
        + ". ./ENV.sh\n"
        + "exec torchrun \\\n  "
        + " \\\n  ".join(arguments)
        + f" \\\n  {program} "
        + '"$@"\n'
    )
