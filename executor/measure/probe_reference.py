"""Reference steps: a few layers of a plan's model, trained the plain way, timed by class.

Operators timed by themselves, over and over on the same tensors, are quicker than inside a
step: there memory is fresh, caches hold something else, and the program between them takes
its time. How much quicker is seen on a step of a model cut down to one layer of each kind,
under data parallelism alone, at the smallest and the largest micro-batch that is asked for.
What other plans do (pipelines, exchanges, recompute) is left to the simulator.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from flopwright.executor.data.batches import Dataset
from flopwright.executor.launch.request import RunEntry, RunRequest
from flopwright.executor.measure.probe_timing import Ranks
from flopwright.executor.measure.protocol import WARMUP_ROUNDS
from flopwright.plan.file import PlanFile
from flopwright.plan.parallel import ParallelPlan
from flopwright.report.metrics import Measurement
from flopwright.spec.load import make_plan_file
from flopwright.spec.model import ModelSpec
from flopwright.spec.parameters import parameters
from flopwright.spec.scenario import Scenario

MICRO_BATCHES: Final = 4
_STEPS_PER_ROUND: Final = 2
_MOST_ROUNDS: Final = 12
# Weights, gradients and AdamW's two states in fp32, and what else a step holds for a while.
_BYTES_PER_PARAMETER: Final = 24
_SHARE_OF_MEMORY: Final = 0.5
_TOKENS: Final = 2**15


def cut_down(spec: ModelSpec) -> ModelSpec:
    """Returns the model with the fewest layers that still hold one of each kind."""
    kinds = [(spec.is_moe_layer(i), spec.sliding_window(i)) for i in range(spec.num_layers)]
    last = max(kinds.index(kind) for kind in set(kinds))
    # Two of a kind, so that what one layer costs is not lost in the table and the head.
    return spec.model_copy(
        update={"num_layers": min(spec.num_layers, max(2, last + 1)), "mtp_layers": 0}
    )


def reference_plans(plans: Sequence[PlanFile], ranks: int, memory_bytes: int) -> list[PlanFile]:
    """Returns the reference steps of the plans' models: two micro-batch sizes each.

    Args:
        memory_bytes: of one rank; a model whose layers need more than half of it is left out.
    """
    found: dict[tuple[str, int], PlanFile] = {}
    by_model: dict[str, list[PlanFile]] = {}
    for plan in plans:
        by_model.setdefault(plan.model_hash, []).append(plan)
    for members in by_model.values():
        scenario = members[0].scenario
        spec = cut_down(scenario.model)
        if _numel(spec) * _BYTES_PER_PARAMETER > _SHARE_OF_MEMORY * memory_bytes:
            continue
        sizes = sorted({m.parallel.micro_batch_size for m in members})
        for size in (sizes[0], sizes[-1]):
            name = f"reference-{len(found)}"
            plan = _plain(scenario, spec, size, ranks, name)
            found.setdefault((plan.model_hash, size), plan)
    return list(found.values())


def _numel(spec: ModelSpec) -> int:
    return sum(int(np.prod(p.shape)) for p in parameters(spec))


def _plain(scenario: Scenario, spec: ModelSpec, size: int, ranks: int, name: str) -> PlanFile:
    workload = scenario.workload.model_copy(
        update={"global_batch_size": size * ranks * MICRO_BATCHES}
    )
    cut = scenario.model_copy(update={"model": spec, "workload": workload})
    # As runs are by default; DeepSpeed is not there where only the machine is to be probed.
    library: Any = "deepspeed" if importlib.util.find_spec("deepspeed") else "none"
    plan = ParallelPlan(dp_shard=ranks, micro_batch_size=size, data_parallel=library)
    return make_plan_file(cut, plan, name)


def probe_steps(plans: Sequence[PlanFile], ranks: Ranks, seconds: float) -> list[Measurement]:
    """Returns the reference steps as measurements (on rank 0; empty elsewhere); collective.

    Args:
        plans: from `reference_plans`.
        ranks: all ranks of the process group, which there must be.
        seconds: time to spend; two rounds are made whatever it is.
    """
    from flopwright.executor.parallel.groups import GroupRegistry
    from flopwright.executor.train.collect import collect
    from flopwright.executor.train.rounds import History, remember
    from flopwright.executor.train.trial import start_trial

    if not plans or not dist.is_initialized():
        return []
    request = _request(plans, ranks.device)
    registry = GroupRegistry()
    trials = [
        start_trial(e, request.workload(e), _data(e.plan.scenario), registry, ranks.device)
        for e in request.entries
    ]
    histories = [History() for _ in trials]
    for turn in _rounds(ranks, seconds):
        for trial, history in zip(trials, histories, strict=True):
            dist.barrier()
            first = turn * _STEPS_PER_ROUND
            records = [
                trial.run_step(first + i, meter_memory=turn == 0 and i == 0)
                for i in range(_STEPS_PER_ROUND)
            ]
            rows = collect(trial, records, trial.groups.world, ranks.device)
            if ranks.rank == 0:
                remember(history, rows)
    return _measurements(request, trials, histories, ranks)


def _rounds(ranks: Ranks, seconds: float) -> Iterator[int]:
    """Yields the numbers of rounds until rank 0's time is up."""
    deadline = time.monotonic() + seconds
    for turn in range(_MOST_ROUNDS):
        late = ranks.agree(float(time.monotonic() > deadline)) > 0
        if late and turn > WARMUP_ROUNDS:
            return
        yield turn


def _measurements(
    request: RunRequest, trials: Sequence[Any], histories: Sequence[Any], ranks: Ranks
) -> list[Measurement]:
    from flopwright.executor.train.results import gather_memory, make_measurement, step_times

    out = []
    for trial, history in zip(trials, histories, strict=True):
        memory = gather_memory(trial)
        if ranks.rank == 0:
            times = step_times(history)
            out.append(make_measurement(trial, request, history, times, memory, None, None))
    return out


def _request(plans: Sequence[PlanFile], device: torch.device) -> RunRequest:
    return RunRequest(
        entries=tuple(RunEntry(name=p.name, plan=p) for p in plans),
        device="cuda" if device.type == "cuda" else "cpu",
        steps=_MOST_ROUNDS * _STEPS_PER_ROUND,
        steps_per_round=_STEPS_PER_ROUND,
        probe=True,
    )


def _data(scenario: Scenario) -> Dataset:
    """Returns random tokens: what is learnt does not matter here."""
    workload, vocab = scenario.workload, scenario.model.vocab_size
    meta: Any = None  # nothing asks where random tokens come from
    tokens = max(_TOKENS, 2 * workload.seq_len)
    kind = np.uint16 if vocab <= np.iinfo(np.uint16).max else np.uint32
    return Dataset(
        folder=Path(),
        meta=meta,
        train=np.random.default_rng(0).integers(0, vocab, tokens).astype(kind),
        held_out=np.zeros(2 * workload.seq_len, dtype=kind),
        seq_len=workload.seq_len,
        global_batch_size=workload.global_batch_size,
        seed=0,
    )
