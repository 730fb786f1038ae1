"""The Slurm batch script of a plan: one task a node, which starts torchrun there.

The job can be started again by Slurm: after a lost node, a preemption, or before the end of
its time, when it stops after the present steps, saves and queues itself again. Each start goes
on from the last checkpoint.
"""

from __future__ import annotations

import math
import shlex
from typing import Final

from flopwright.plan.file import PlanFile
from flopwright.planner.export.target import RENDEZVOUS_PORT, header, placement, slug
from flopwright.planner.export.torchrun import (
    ENDPOINT_VARIABLE,
    RUN_FOLDER,
    program_arguments,
    torchrun_arguments,
)
from flopwright.planner.whole_run import whole_run
from flopwright.report.metrics import Prediction

# What an interruption may cost: a checkpoint stands at least so often.
SAVE_EVERY_S: Final = 1800.0
# Steps that the executor still makes once it is told to stop, at most.
ENDING_STEPS: Final = 2
# A file of this name in the run's folder tells it so (executor/launch/request.py).
STOP_FILE: Final = "stop-now"
# To write the last checkpoint in, beside the steps under way.
_ENDING_S: Final = 120.0
_LONGEST_WARNING_S: Final = 65_535  # that sbatch takes
_MINUTE_S: Final = 60
# Ports of jobs that one node serves at once, or one after the other, do not meet.
_PORTS: Final = 1000

# The nodes meet at the first of them, by the address under which Slurm's own daemons reach it.
_MEET: Final = (
    'head="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"\n'
    'address="$(scontrol --oneliner show node "$head" | '
    "sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p')\"\n"
    f'port="$(({RENDEZVOUS_PORT} + SLURM_JOB_ID % {_PORTS}))"\n'
    f'export RDZV_ENDPOINT="${{address:-$head}}:$port"\n'
)

# SIGTERM comes to this script alone: before the end of --time, or by scancel --batch.
_ON_TERM: Final = f"""\
folder={RUN_FOLDER}
before=
for argument in "$@"; do
  if [ "$before" = --out ]; then folder="$argument"; fi
  case "$argument" in --out=*) folder="${{argument#--out=}}" ;; esac
  before="$argument"
done
stopped=
stop() {{
  stopped=yes
  touch "$folder/{STOP_FILE}" || true
}}
trap stop TERM
"""

# A run that was asked to stop ends well once it has saved; one that failed is not repeated.
_WAIT: Final = """\
training=$!
code=0
wait "$training" || code=$?
while [ "$code" -gt 128 ] && kill -0 "$training" 2>/dev/null; do # a signal ended the wait
  code=0
  wait "$training" || code=$?
done
if [ -n "$stopped" ] && [ "$code" -eq 0 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
"""


def time_limit_h(plan: PlanFile, prediction: Prediction) -> int:
    """Returns the whole run's hours at the upper end of its interval, rounded up."""
    return math.ceil(24 * whole_run(plan.scenario, prediction).days_interval.high)


def checkpoint_steps(plan: PlanFile, prediction: Prediction) -> int:
    """Returns the steps between checkpoints: half an hour's, or all of a shorter run."""
    steps = int(SAVE_EVERY_S / prediction.metrics.step_time_s)
    return max(1, min(steps, plan.scenario.workload.num_steps))


def warning_s(plan: PlanFile, prediction: Prediction) -> int:
    """Returns how long before the end of its time the job is told, in whole minutes.

    The steps under way end, twice as slow as the interval's upper end, and are saved; a job is
    not told before half of its time.
    """
    needed_s = 2 * ENDING_STEPS * prediction.step_time_interval.high + _ENDING_S
    half = time_limit_h(plan, prediction) * 3600 // 2
    return min(math.ceil(needed_s / _MINUTE_S) * _MINUTE_S, half, _LONGEST_WARNING_S)


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
    return (
        *options,
        f"--time={time_limit_h(plan, prediction)}:00:00",
        f"--signal=B:TERM@{warning_s(plan, prediction)}",
        "--requeue",
        "--open-mode=append",
        "--output=slurm-%j.out",
    )


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
    saving = f"--checkpoint-every {checkpoint_steps(plan, prediction)} --resume"
    return (
        "#!/usr/bin/env bash\n"
        + "".join(f"#SBATCH {option}\n" for option in sbatch_options(plan, prediction))
        + header(plan, "slurm")
        + "# Submit from this folder: sbatch [--partition=P --account=A] sbatch.sh --text FOLDER\n"
        + "# More arguments go to the training program; a later one counts.\n"
        + "set -euo pipefail\n"
        + 'cd "$SLURM_SUBMIT_DIR"\n'
        + ". ./ENV.sh\n"
        + (_MEET if placement(plan).nodes > 1 else "")
        + _ON_TERM
        + f"srun --kill-on-bad-exit=1 {_cores(plan)}torchrun \\\n  "
        + " \\\n  ".join(arguments)
        + f" \\\n  {shlex.join(program_arguments())} {saving} "
        + '"$@" &\n'
        + _WAIT
    )


def _cores(plan: PlanFile) -> str:
    """Returns srun's option for the cores of a node, which it does not take from the job's."""
    cores = plan.scenario.cluster.node.cores
    return "" if cores is None else f'--cpus-per-task="${{SLURM_CPUS_PER_TASK:-{cores}}}" '
