"""One training of the study: a plan is written, `flopwright run` trains it, files are read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from flopwright.executor.launch.machine import die_with_parent
from flopwright.executor.launch.request import STEPS_FILE, measurement_file
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import dump_yaml, load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import LearningRate, Optimizer

SCENARIO: Final = "kimi_k2_mini_2cpu_fp32"
CHECKPOINT_EVERY: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training; its name is that of its folder.

    Attributes:
        batch: (sequences, tokens a sequence) of a step.
        saves: whether it saves on the way.
        characters: a text of its own, read character by character; None: the study's.
    """

    name: str
    optimizer: Optimizer
    rate: LearningRate
    steps: int
    batch: tuple[int, int]
    saves: bool = True
    characters: Path | None = None


@dataclass(slots=True)
class Place:
    """Where trainings stand, and what all of them share."""

    folder: Path
    text: Path | None
    layers: int | None
    jobs: int
    running: set[subprocess.Popen[bytes]] = field(default_factory=set)

    def scenario(self, job: Job) -> Scenario:
        """Returns the mini scenario with a job's workload."""
        mini = load_scenario(SCENARIO)
        sequences, seq_len = job.batch
        workload = mini.workload.model_copy(
            update={
                "seq_len": seq_len,
                "global_batch_size": sequences,
                "total_tokens": job.steps * sequences * seq_len,
                "optimizer": job.optimizer,
                "learning_rate": job.rate,
            }
        )
        model = mini.model.model_copy(
            update={} if self.layers is None else {"num_layers": self.layers}
        )
        return mini.model_copy(update={"workload": workload, "model": model})

    def train(self, jobs: Sequence[Job]) -> None:
        """Trains what is not trained yet, some at once."""
        waiting = [job for job in jobs if len(self.losses(job)) < job.steps]
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                list(pool.map(self._run, waiting))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in tuple(self.running):
                    process.terminate()  # it saves and ends after its round
                raise

    def _run(self, job: Job) -> None:
        plan = self.folder / f"{job.name}.plan.yaml"
        parallel = ParallelPlan(micro_batch_size=job.batch[0], data_parallel="none")
        plan.write_text(dump_yaml(make_plan_file(self.scenario(job), parallel, job.name)))
        command = [sys.executable, "-m", "flopwright", "run", str(plan), "--no-store"]
        command += ["--out", str(self.folder / job.name), "--name", job.name, "--resume"]
        every = max(1, min(CHECKPOINT_EVERY, job.steps // 4))
        command += ["--checkpoint-every", str(every)] if job.saves else []
        text = job.characters or self.text
        command += [] if text is None else ["--text", str(text)]
        command += [] if job.characters is None else ["--tokenizer", "characters"]
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        with (self.folder / f"{job.name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent
            )
        self.running.add(process)
        code = process.wait()
        self.running.discard(process)
        if code != 0 or len(self.losses(job)) < job.steps:
            raise SystemExit(f"{job.name} did not end: see {log.name}")

    def losses(self, job: Job) -> list[float]:
        """Returns the losses of a training that ended, of every step; empty before it did."""
        path = self.folder / job.name / measurement_file(job.name)
        return list(json.loads(path.read_text())["losses"]) if path.is_file() else []

    def rows(self, job: Job) -> list[dict[str, Any]]:
        """Returns a training's record of each step."""
        text = (self.folder / job.name / STEPS_FILE).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def measurement(self, job: Job) -> dict[str, Any]:
        """Returns the measurement of a training that ended."""
        path = self.folder / job.name / measurement_file(job.name)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found
