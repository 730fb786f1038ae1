"""The torchrun command of a plan, as an argument list and as a script."""

from __future__ import annotations

import shlex
from typing import Final

from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import PLAN_FILE, RENDEZVOUS_PORT, header, placement

WORKER_MODULE: Final = "flopwright.executor.train.worker"
RUN_FOLDER: Final = "run"
# Where several nodes meet, as the scripts read it from the environment.
ENDPOINT_VARIABLE: Final = "$RDZV_ENDPOINT"
EXIT_USAGE: Final = 64


def torchrun_arguments(plan: PlanFile, *, endpoint: str | None = None) -> tuple[str, ...]:
    """Returns the arguments of torchrun up to and including the module it starts.

    The ranks' output is shown for rank 0 and kept for all in the run's folder.

    Args:
        endpoint: host:port at which several nodes meet, theirs to give; on one node torchrun
            meets itself on a free port of the loopback interface.
    """
    where = placement(plan)
    if where.nodes == 1:
        meeting: tuple[str, ...] = ("--standalone", "--local-addr=127.0.0.1")
    else:
        at = endpoint or ENDPOINT_VARIABLE
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint={at}", "--rdzv-id=flopwright")
    return (
        *meeting,
        f"--nnodes={where.nodes}",
        f"--nproc-per-node={where.ranks_per_node}",
        "--max-restarts=0",
        f"--log-dir={RUN_FOLDER}/logs",
        "--tee=3",
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
        f'--rdzv-endpoint="{ENDPOINT_VARIABLE}"'
        if a.startswith("--rdzv-endpoint=")
        else shlex.quote(a)
        for a in torchrun_arguments(plan)
    ]
    several, refusal = _several_nodes(where.nodes) if where.nodes > 1 else ("", "")
    program = shlex.join(program_arguments())
    return (
        "#!/usr/bin/env bash\n"
        + header(plan, "torchrun")
        + several
        + "# More arguments go to the training program, such as --text FOLDER,\n"
        + "# or --checkpoint-every 100 --resume.\n"
        + "set -euo pipefail\n"
        + refusal
        + 'cd "$(dirname "$0")"\n'
        + ". ./ENV.sh\n"
        + "exec torchrun \\\n  "
        + " \\\n  ".join(arguments)
        + f" \\\n  {program} "
        + '"$@"\n'
    )


def _several_nodes(nodes: int) -> tuple[str, str]:
    """Returns the comment and the check of a script that each of several nodes runs."""
    # a default such as localhost would leave every node waiting for the others by itself
    return (
        f"# Run it on each of the {nodes} nodes, with RDZV_ENDPOINT=FIRST_NODE:"
        f"{RENDEZVOUS_PORT}.\n",
        'if [ -z "${RDZV_ENDPOINT:-}" ]; then\n'
        f'  echo "torchrun.sh: this plan is for {nodes} nodes: start it on each of them with '
        f'RDZV_ENDPOINT=FIRST_NODE:{RENDEZVOUS_PORT} set, or use sbatch.sh" >&2\n'
        f"  exit {EXIT_USAGE}\n"
        "fi\n",
    )
