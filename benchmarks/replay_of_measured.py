"""Does a run's own durations, replayed, give its step time? One JSON object as the last line.

Two ranks train Kimi K2 in miniature under several pipelines and data parallelism, the plans in
turns. The measured durations of a step's actions go into the simulator's replay, which puts
them together again by the plan's list: `error` is, by plan, the median over steps of the
replay's step time to the measured one, less 1; `worst` the largest of them without its sign.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from flopwright.executor.data.batches import Dataset
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.executor.measure.timers import StepTrace
from flopwright.executor.parallel.groups import GroupRegistry, gather_bytes
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.plan.parallel import ParallelPlan
from flopwright.simulator.training.measured import RankStep, replayed_step_seconds
from flopwright.simulator.training.program import program_of
from flopwright.spec.load import load_scenario, make_plan_file

CPU: Final = torch.device("cpu")
PLANS: Final[dict[str, dict[str, Any]]] = {
    "pp2 1f1b": {"pp": 2},
    "pp2 gpipe": {"pp": 2, "schedule": "gpipe"},
    "pp2 zb_v": {"pp": 2, "vpp": 2, "schedule": "zb_v"},
    "pp2 dualpipe_v": {"pp": 2, "vpp": 2, "schedule": "dualpipe_v"},
    "dp2": {"dp_shard": 2},
}


def trials() -> dict[str, Trial]:
    """Returns the plans, ready to train on random tokens."""
    scenario = load_scenario("kimi_k2_mini_2cpu_fp32")
    workload = scenario.workload.model_copy(update={"global_batch_size": 16})
    vocab = scenario.model.vocab_size
    meta: Any = None
    data = Dataset(
        folder=Path(),
        meta=meta,
        train=np.random.default_rng(0).integers(0, vocab, 60_000).astype(np.uint16),
        held_out=np.zeros(2 * workload.seq_len, dtype=np.uint16),
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        seed=0,
    )
    registry, out = GroupRegistry(), {}
    for name, fields in PLANS.items():
        plan = ParallelPlan(micro_batch_size=2, **fields)
        entry = RunEntry(name=name, plan=make_plan_file(scenario, plan, name))
        out[name] = start_trial(entry, workload, data, registry, CPU)
    return out


def actions_of(trace: StepTrace) -> RankStep:
    """Returns when each action of a rank's step began and ended; "" is the step itself."""
    out = {"": (trace.began_s, trace.began_s + trace.duration_s)}
    for event in trace.events:
        begin, end = trace.began_s + event.start_s, trace.began_s + event.end_s
        before = out.get(event.name, (begin, end))
        out[event.name] = (min(before[0], begin), max(before[1], end))
    return out


def error(trial: Trial, traces: list[StepTrace]) -> float:
    """Returns the replay's step time to the measured one, less 1, the median over steps."""
    mine = json.dumps([actions_of(t) for t in traces]).encode()
    ranks = [json.loads(data) for data in gather_bytes(mine, trial.groups.world, CPU)]
    plan = trial.plan
    steps = [
        [[ranks[stage * plan.dp + replica][i] for replica in range(plan.dp)]
         for stage in range(plan.pp)]
        for i in range(len(traces))
    ]  # fmt: skip
    began = [min(rank[i][""][0] for rank in ranks) for i in range(len(traces))]
    measured = [max(rank[i][""][1] for rank in ranks) - b for i, b in enumerate(began)]
    program = program_of(plan, plan.num_microbatches(trial.workload.global_batch_size))
    replayed = replayed_step_seconds(program, steps)
    return statistics.median(r / m for r, m in zip(replayed, measured, strict=True)) - 1


def rank_main(out: Path, rounds: int, steps: int) -> None:
    """Runs one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    running = trials()
    traces: dict[str, list[StepTrace]] = {name: [] for name in running}
    step = 0
    for turn in range(rounds + 1):
        for name, trial in running.items():
            for i in range(steps):
                dist.barrier()
                record = trial.run_step(step + i)
                if turn:  # the first round warms up
                    traces[name].append(record.trace)
        step += steps
    found = {name: error(trial, traces[name]) for name, trial in running.items()}
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Starts two ranks, or is one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.rank_of is not None:
        rank_main(parsed.rank_of, parsed.rounds, parsed.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
             __file__, "--rank-of", str(out), "--rounds", str(parsed.rounds),
             "--steps", str(parsed.steps)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        )  # fmt: skip
        found = json.loads(out.read_text(encoding="utf-8"))
    result = {
        "worst": max(map(abs, found.values())),
        "error": found,
        "machine": processor_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "repeats": parsed.rounds * parsed.steps,
        "spread": max(found.values()) - min(found.values()),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
