"""What the executor adds to a step: one JSON object as the last line.

    vs_bare_loop        one process: our step to a plain loop over the same module with
                        torch's own clipping and AdamW
    vs_deepspeed_loop   two ranks, ZeRO-1: our step to DeepSpeed's own loop (engine.backward,
                        engine.step) over the same module

Kimi K2 in miniature, four micro-batches a step. Each number is the median over interleaved
pairs of our time over theirs; 1 or less where ours is at least as fast. `spread` is the
widest distance between the quartiles of the pairs' ratios; `noise` compares the other loop
with itself in the same way.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from flopwright.executor.data.batches import Dataset
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.measure.fingerprint import processor_name
from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.models.transformer.module import Stage, build_stage, init_weights_, loss
from flopwright.plan.parallel import ParallelPlan
from flopwright.spec.load import load_scenario, make_plan_file
from flopwright.spec.scenario import Scenario
from flopwright.spec.workload import Workload

CPU: Final = torch.device("cpu")
MICRO_BATCHES: Final = 4
Step = Callable[[int], float]


def scenario(world: int, micro_batch: int) -> Scenario:
    """Returns the miniature with four micro-batches a rank and step."""
    base = load_scenario("kimi_k2_mini_2cpu_fp32")
    batch = MICRO_BATCHES * micro_batch * world
    workload = base.workload.model_copy(update={"global_batch_size": batch})
    return base.model_copy(update={"workload": workload})


def dataset(spec: Scenario) -> Dataset:
    """Returns random tokens."""
    workload, vocab = spec.workload, spec.model.vocab_size
    meta: Any = None
    return Dataset(
        folder=Path(),
        meta=meta,
        train=np.random.default_rng(0).integers(0, vocab, 100_000).astype(np.uint16),
        held_out=np.zeros(2 * workload.seq_len, dtype=np.uint16),
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        seed=0,
    )


def our_trial(spec: Scenario, plan: ParallelPlan, data: Dataset) -> Trial:
    """Returns the executor's side."""
    entry = RunEntry(name="ours", plan=make_plan_file(spec, plan, "ours"))
    return start_trial(entry, spec.workload, data, GroupRegistry(), CPU)


def fresh_stage(spec: Scenario) -> Stage:
    """Returns the same module with the same weights."""
    stage = build_stage(spec.model, range(-1, spec.model.num_layers + 1))
    init_weights_(stage, spec.model, spec.workload.seed)
    for block in stage.moe_blocks().values():
        block.gate.balance_share = 1 / MICRO_BATCHES
    return stage.train()


def adamw(stage: Stage, workload: Workload) -> torch.optim.AdamW:
    """Returns torch's optimizer as the executor uses it."""
    spec, parameters = workload.optimizer, [p for p in stage.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": spec.weight_decay},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-4,
        betas=(spec.beta1, spec.beta2),
        eps=spec.eps,
        fused=True,
    )


def balance(stage: Stage) -> None:
    """Moves the routers' biases, as every loop over this model must."""
    for block in stage.moe_blocks().values():
        if block.loads is not None:
            block.gate.update_bias_(block.loads)
            block.reset_loads()


def bare_loop(spec: Scenario, data: Dataset, micro_batch: int) -> Step:
    """Returns one step of the plain loop."""
    stage = fresh_stage(spec)
    optimizer = adamw(stage, spec.workload)

    def step(number: int) -> float:
        total = torch.zeros(())
        for rows in torch.from_numpy(data.rank_slice(number, 0, 1, micro_batch)):
            value = loss(stage(rows[:, :-1].contiguous()), rows[:, 1:].contiguous())
            (value / MICRO_BATCHES).backward()
            total += value.detach() / MICRO_BATCHES
        nn.utils.clip_grad_norm_(stage.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        balance(stage)
        return float(total)

    return step


class WithLoss(nn.Module):
    """DeepSpeed's engine calls the module: the loss belongs inside."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Returns the mean nats a token."""
        return loss(self.stage(tokens), targets)


def deepspeed_loop(spec: Scenario, data: Dataset, micro_batch: int) -> Step:
    """Returns one step of DeepSpeed's own loop, ZeRO-1."""
    import deepspeed

    stage = fresh_stage(spec)
    engine, *_ = deepspeed.initialize(
        model=WithLoss(stage),
        optimizer=adamw(stage, spec.workload),
        config={
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(number: int) -> float:
        total = torch.zeros(())
        for rows in torch.from_numpy(data.rank_slice(number, rank, world, micro_batch)):
            value = engine(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
            engine.backward(value)
            engine.step()
            total += value.detach() / MICRO_BATCHES
        balance(stage)
        return float(total)

    return step


def compare(ours: Step, theirs: Step, pairs: int) -> dict[str, Any]:
    """Returns the ratios over interleaved steps; first losses must agree."""
    difference = abs(ours(0) - theirs(0))
    assert difference < 1e-4, difference
    for number in (1, 2):
        ours(number), theirs(number)
    ratios, noise, seconds = [], [], []
    for number in range(3, 3 + pairs):
        took = {}
        order = [("theirs", theirs), ("ours", ours), ("again", theirs)]
        for name, step in order if number % 2 else order[::-1]:
            dist.barrier()
            began = time.perf_counter()
            step(number)
            dist.barrier()
            took[name] = time.perf_counter() - began
        other = (took["theirs"] + took["again"]) / 2
        ratios.append(took["ours"] / other)
        noise.append(max(took["theirs"], took["again"]) / min(took["theirs"], took["again"]))
        seconds.append(took["ours"])
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "quartiles": high - low,
        "noise": statistics.median(noise) - 1,
        "step_s": statistics.median(seconds),
    }


def rank_main(out: Path, pairs: int, micro_batch: int) -> None:
    """Runs one rank of one comparison: a world of one is the bare loop's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    spec = scenario(world, micro_batch)
    data = dataset(spec)
    if world == 1:
        plan = ParallelPlan(micro_batch_size=micro_batch)
        theirs = bare_loop(spec, data, micro_batch)
    else:
        from flopwright.executor.parallel.data_parallel import deepspeed_internals as internals

        internals.quiet_logging()
        internals.start_communication()
        plan = ParallelPlan(dp_shard=2, zero_stage=1, micro_batch_size=micro_batch)
        theirs = deepspeed_loop(spec, data, micro_batch)
    trial = our_trial(spec, plan, data)

    def ours(number: int) -> float:
        value = trial.run_step(number).loss
        assert value is not None
        return float(value)

    found = compare(ours, theirs, pairs)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def launched(world: int, pairs: int, micro_batch: int) -> dict[str, Any]:
    """Returns what a launch of so many ranks found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={world}", __file__, "--rank-of", str(out),
             "--pairs", str(pairs), "--micro-batch", str(micro_batch)],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                 "TORCH_COMPILE_DISABLE": "1"},
        )  # fmt: skip
        found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Starts both comparisons, or is one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.rank_of is not None:
        rank_main(parsed.rank_of, parsed.pairs, parsed.micro_batch)
        return
    bare = launched(1, parsed.pairs, parsed.micro_batch)
    deepspeed = launched(2, parsed.pairs, parsed.micro_batch)
    result = {
        "vs_bare_loop": bare["ratio"],
        "vs_deepspeed_loop": deepspeed["ratio"],
        "step_s": {"one process": bare["step_s"], "two ranks": deepspeed["step_s"]},
        "noise": max(bare["noise"], deepspeed["noise"]),
        "machine": processor_name(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "repeats": parsed.pairs,
        "spread": max(bare["quartiles"], deepspeed["quartiles"]),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
