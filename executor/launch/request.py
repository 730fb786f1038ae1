"""What the launcher asks of the ranks: a file both sides read, and the names of a run's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from flopwright.errors import InputError, Violation
from flopwright.plan.file import PlanFile
from flopwright.spec.base import Spec
from flopwright.spec.workload import Workload

REQUEST_FILE: Final = "request.json"
PROGRESS_FILE: Final = "progress.jsonl"
STEPS_FILE: Final = "steps.jsonl"
ROUNDS_FILE: Final = "rounds.jsonl"
PROBE_FILE: Final = "probe.json"
STOP_FILE: Final = "stop"  # after the present round
STOP_NOW_FILE: Final = "stop-now"  # after the present step, as on SIGTERM
STOPPED_FILE: Final = "stopped.json"  # where a run that was told to end stands
RESERVE_FILE: Final = ".reserve"  # given up when the disk is full, to say so
ROLLBACKS_FILE: Final = "rollbacks.jsonl"
RETIRED_FILE: Final = "retired.json"
LOG_DIR: Final = "logs"
ERROR_DIR: Final = "errors"
DATA_DIR: Final = "data"

COLLECTIVE_TIMEOUT_S: Final = 600.0

SinkName = Literal["tensorboard", "wandb", "mlflow"]
WORKER_MODULE: Final = "flopwright.executor.train.worker"


class RunEntry(Spec):
    """One plan of a launch, under the name its results get."""

    name: str
    plan: PlanFile


class RunRequest(Spec):
    """One launch: which plans, on what, for how long.

    Attributes:
        steps: optimizer steps of each plan.
        steps_per_round: steps a plan makes before the next plan has its turn.
        stream: whether the text is read while the run goes on, and not before its first step.
        prefetch: batches that a process beside each rank makes before their steps; 0: none does.
        held_out_sequences: held-out sequences the final loss is taken over.
        checkpoints: whether each plan's weights are written at the end.
        mismatch: what differs from the plans and was allowed.
        log_to: where figures go besides the JSONL files (measure/sinks.py).
        kineto_trace: whether one step of each plan is written as a Kineto trace.
        checkpoint_every: steps between checkpoints while it runs; None: at the end alone.
        keep_checkpoints: how many steps' checkpoints of a plan stay.
        max_rollbacks: how often the run goes back to before a loss spike and leaves its data out.
        start_from: a step folder whose weights and optimizer state step 0 begins with.
        resume_step: steps that the folder's run has made and goes on from.
        export_hf: whether the last weights are also written as Hugging Face has them.
        deterministic: whether torch may use only algorithms that give the same bits again.
        collective_timeout_s: how long a rank waits for others before it ends the run.
    """

    entries: tuple[RunEntry, ...]
    device: Literal["cpu", "cuda"]
    steps: PositiveInt
    steps_per_round: PositiveInt = 4
    seed: NonNegativeInt = 0
    text: str | None = None
    tokenizer: Literal["bpe", "characters"] = "bpe"
    stream: bool = False
    prefetch: NonNegativeInt = 0
    probe: bool = False
    probe_budget_s: PositiveFloat = 45.0
    held_out_sequences: PositiveInt = 64
    checkpoints: bool = True
    checkpoint_every: PositiveInt | None = None
    keep_checkpoints: PositiveInt = 2
    max_rollbacks: NonNegativeInt = 0
    start_from: str | None = None
    resume_step: NonNegativeInt = 0
    deterministic: bool = False
    export_hf: bool = False
    mismatch: tuple[str, ...] = ()
    log_to: tuple[SinkName, ...] = ()
    kineto_trace: bool = False
    collective_timeout_s: PositiveFloat = COLLECTIVE_TIMEOUT_S

    def workload(self, entry: RunEntry) -> Workload:
        """Returns the entry's workload with this launch's seed."""
        return entry.plan.scenario.workload.model_copy(update={"seed": self.seed})


def measurement_file(name: str) -> str:
    """Returns the file name of an entry's Measurement."""
    return f"measurement-{name}.json"


def trace_file(name: str) -> str:
    """Returns the file name of an entry's Chrome trace of one step."""
    return f"trace-{name}.json"


def kineto_file(name: str, rank: int) -> str:
    """Returns the path in the run's folder of a rank's Kineto trace of an entry's step."""
    return f"kineto-{name}/rank-{rank:05d}.json"


def checkpoint_dir(name: str) -> str:
    """Returns the folder name of an entry's checkpoint."""
    return f"checkpoint-{name}"


def hf_dir(name: str) -> str:
    """Returns the folder name of an entry's weights in the Hugging Face layout."""
    return f"hf-{name}"


def read_retired(out_dir: Path) -> frozenset[str]:
    """Returns the plans that the run's folder says take no more turns."""
    path = out_dir / RETIRED_FILE
    return (
        frozenset(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else frozenset()
    )


def read_request(path: Path) -> RunRequest:
    """Returns the request that `write_json` wrote.

    Raises:
        InputError: it is truncated, or of another version.
    """
    try:
        return RunRequest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:  # pydantic's too
        rule = "truncated, or not what this version of flopwright writes"
        fix = "start in another folder: its checkpoints can be read by themselves"
        raise InputError(Violation(file=str(path), rule=rule, nearest_fix=fix)) from error


def write_json(path: Path, data: Any) -> None:
    """Writes plain data so that a reader sees all of it or nothing."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(data, indent=1), encoding="utf-8")
    temporary.replace(path)
