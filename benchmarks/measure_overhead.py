"""What measuring costs a run: one JSON object as the last line.

Two ranks train Kimi K2 in miniature (expert parallelism, ZeRO-1). Steps with action timers and
steps whose timers do nothing take turns, in pairs; `timers` is the median over pairs of the
ratio of their times, less 1. The machine's noise between two equal steps is larger than that,
so `timers_counted` is beside it: actions a step times the seconds of one empty action, over the
step. `log` is what bringing the figures together and writing them takes of a step.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from flopwright.executor.data.token_batch import TokenBatch
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.measure.log import RunLog
from flopwright.executor.measure.timers import ActionTimer
from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.train.collect import collect
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_scenario, make_plan_file

PAIRS = 20
WORLD = 2
CPU = torch.device("cpu")
PLAN = ParallelPlan(dp_shard=2, ep=2, zero_stage=1, micro_batch_size=4)


class Rows:
    """The data set's interface over made-up tokens."""

    def __init__(self, vocab: int, sequences: int, seq_len: int) -> None:
        self._rows = np.random.default_rng(0).integers(0, vocab, (sequences, seq_len + 1))

    def rank_batch(self, _step: int, rank: int, dp: int, size: int) -> TokenBatch:
        """Returns one rank's micro-batches, the same each step."""
        rows = self._rows.reshape(-1, dp, size, self._rows.shape[-1])[:, rank]
        return TokenBatch(tokens=rows)


class Switch:
    """Turns the timers' marks off and on."""

    def __init__(self) -> None:
        self._methods = {name: getattr(ActionTimer, name) for name in ("begin", "end")}

    def __call__(self, on: bool) -> None:
        """Sets them for what follows."""
        for name, method in self._methods.items():
            setattr(ActionTimer, name, method if on else lambda *_args: None)


def step_s(trial: Trial, step: int) -> float:
    """Returns the seconds of a step, from a barrier on."""
    dist.barrier()
    began = time.perf_counter()
    trial.run_step(step)
    return time.perf_counter() - began


def empty_action_s() -> float:
    """Returns the seconds of an action with nothing inside."""
    timer = ActionTimer(0, CPU)
    timer.start_step()
    began = time.perf_counter()
    for _ in range(10_000):
        with timer.action("F(0,0)", "forward"):
            pass
    return (time.perf_counter() - began) / 10_000


def rank_main(rank: int, folder: Path) -> None:
    """Runs one rank; rank 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        world_size=WORLD,
        rank=rank,
        timeout=timedelta(seconds=120),
    )
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload
    plan = make_plan_file(scenario, PLAN, "p")
    data: Any = Rows(scenario.model.vocab_size, workload.global_batch_size, workload.seq_len)
    trial = start_trial(RunEntry(name="p", plan=plan), workload, data, GroupRegistry(), CPU)
    switch = Switch()
    for step in range(3):
        trial.run_step(step)
    ratios, steps = [], []
    for pair in range(PAIRS):
        seconds = {}
        for on in (True, False) if pair % 2 else (False, True):
            switch(on)
            seconds[on] = step_s(trial, 3 + pair)
        ratios.append(seconds[True] / seconds[False])
        steps.append(seconds[True])
    switch(True)
    records = [trial.run_step(100 + i) for i in range(4)]
    log = RunLog(folder) if rank == 0 else None
    began = time.perf_counter()
    rows = collect(trial, records, trial.groups.world, CPU)
    if log is not None:
        log.turn("p", plan, 0, rows, 0.0)
    log_s = (time.perf_counter() - began) / len(records)
    if rank == 0:
        write(folder, ratios, steps, len(records[0].trace.events), log_s)
    dist.destroy_process_group()


def write(
    folder: Path, ratios: list[float], steps: list[float], actions: int, log_s: float
) -> None:
    """Writes the result file."""
    step = statistics.median(steps)
    low, high = np.quantile(ratios, (0.25, 0.75))
    result = {
        "timers": statistics.median(ratios) - 1,
        "timers_quartiles": [float(low) - 1, float(high) - 1],
        "timers_counted": actions * empty_action_s() / step,
        "log": log_s / step,
        "step_s": step,
        "actions": actions,
        "spread": (max(steps) - min(steps)) / step,
    }
    (folder / "result.json").write_text(json.dumps(result))


def main() -> None:
    """Starts the ranks and prints rank 0's result."""
    with tempfile.TemporaryDirectory() as name:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "GLOO_SOCKET_IFNAME": "lo",
            "TORCH_COMPILE_DISABLE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "WORLD_SIZE": str(WORLD),
        }
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(rank), name],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(WORLD)
        ]
        assert not any(rank.wait() for rank in ranks), "a rank failed"
        result = json.loads((Path(name) / "result.json").read_text())
    about = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "date": datetime.now(UTC).date().isoformat(),
        "repeats": PAIRS,
    }
    print(json.dumps(result | about))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank_main(int(sys.argv[1]), Path(sys.argv[2]))
    else:
        main()
