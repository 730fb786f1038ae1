"""The Slurm batch script of a plan: one task a node, which starts torchrun there."""

from __future__ import annotations

import math
import shlex
from typing import Final

from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import RENDEZVOUS_PORT, header, placement, slug
from flopwright.planner.export.torchrun import (
    ENDPOINT_VARIABLE,
    program_arguments,
    torchrun_arguments,
)
from flopwright.planner.whole_run import whole_run
from flopwright.report.metrics import Prediction

# The first node of the job is where the others meet.
_MEET: Final = (
    'head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
    f'export RDZV_ENDPOINT="$head:{RENDEZVOUS_PORT}"\n'
)


def time_limit_h(plan: PlanFile, prediction: Prediction) -> int:
    """Returns the whole run's hours at the upper end of its interval, rounded up."""
    return math.ceil(24 * whole_run(plan.scenario, prediction).days_interval.high)


def sbatch_options(plan: PlanFile, prediction: Prediction) -> tuple[str, ...]:
    """Returns the #SBATCH options; partition, account and qos are the site's to add."""
    where, node = placement(plan), plan.scenario.cluster.node
    options = [
        f"--job-name={slug(plan.name)}",
        f"--nodes={where.nodes}",
        "--ntasks-per-node=1",
    ]
    if node.gpu.kind != "cpu":
        options.append(f"--gpus-per-node={where.ranks_per_node}")
    if node.cores is not None:
        options.append(f"--cpus-per-task={node.cores}")
    if where.nodes > 1 or where.ranks_per_node == node.gpus:
        options += ["--exclusive", "--mem=0"]
    options += [f"--time={time_limit_h(plan, prediction)}:00:00", "--output=slurm-%j.out"]
    return tuple(options)


def sbatch_script(plan: PlanFile, prediction: Prediction) -> str:
    """Returns the batch script, to be submitted from the bundle's folder."""
    arguments = [
        f'--rdzv-endpoint="{ENDPOINT_VARIABLE}"'
        if a.startswith("--rdzv-endpoint=")
        else '--nnodes="$SLURM_NNODES"'
        if a.startswith("--nnodes=")
        else '--rdzv-id="$SLURM_JOB_ID"'
        if a.startswith("--rdzv-id=")
        else shlex.quote(a)
        for a in torchrun_arguments(plan)
    ]
    return (
        "#!/usr/bin/env bash\n"
        + "".join(f"#SBATCH {option}\n" for option in sbatch_options(plan, prediction))
        + header(plan, "slurm")
        + "# Submit from this folder: sbatch [--partition=P --account=A] sbatch.sh --text FOLDER\n"
        + "set -euo pipefail\n"
        + 'cd "$SLURM_SUBMIT_DIR"\n'
        + ". ./ENV.sh\n"
        + (_MEET if placement(plan).nodes > 1 else "")
        + "srun --kill-on-bad-exit=1 torchrun \\\n  "
        + " \\\n  ".join(arguments)
        + f" \\\n  {shlex.join(program_arguments())} "
        + '"$@"\n'
    )
