"""One step of one rank of a plan, run by the executor's own code on tensors without values."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from flopwright.executor.data.token_batch import TokenBatch
from flopwright.executor.dry.host import HostCopies
from flopwright.executor.dry.memory import StorageMeter, memory_by_class
from flopwright.executor.dry.record import Recorder, RecordingTimer
from flopwright.executor.dry.roles import shortened
from flopwright.executor.dry.world import fake_world
from flopwright.executor.launch.request import RunEntry
from flopwright.executor.parallel.groups import GroupRegistry
from flopwright.executor.parallel.pipeline_links import Links
from flopwright.executor.train.trial import Trial, start_trial
from flopwright.plan.file import PlanFile
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.report.rank_step import RankStep
from flopwright.spec.workload import Workload

# What a process without GPUs can stand for: the modules' operators keep the same tensors
# everywhere (models/, kernels/), and copies to the host are told apart by their holders.
_DEVICE: Final = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _NoData:
    """Stands for the dataset: batches of the right shape, whatever the tokens."""

    seq_len: int
    global_batch_size: int

    def rank_batch(
        self, step: int, dp_rank: int, dp_size: int, micro_batch_size: int
    ) -> TokenBatch:
        """Returns tokens [micro-batches, sequences, seq_len + 1]."""
        microbatches = self.global_batch_size // (dp_size * micro_batch_size)
        shape = (microbatches, micro_batch_size, self.seq_len + 1)
        return TokenBatch(tokens=np.zeros(shape, np.int64))


@dataclass(slots=True)
class _InstantLinks(Links):
    """A message to nobody has left as soon as it is sent."""

    def send(self, action: Action, tensor: Tensor) -> None:
        """Sends, and keeps nothing."""
        Links.send(self, action, tensor)
        self.finish()


def dry_step(plan: PlanFile, rank: int) -> RankStep:
    """Returns what rank `rank` does in an optimizer step past the first.

    A process runs one at a time: the process group is the process's.
    """
    with fake_world(rank, plan.parallel.world_size) as mode:
        recorder = Recorder(mode, _DEVICE)
        with mode, recorder, recorder.meter.watching_resizes():
            trial = _trial(plan, recorder)
            found = _record(trial, recorder)
            del trial
    gc.collect()
    gc.freeze()  # what stands now, libraries above all, need not be searched for the next rank
    return found


def _trial(plan: PlanFile, recorder: Recorder) -> Trial:
    """Returns the rank's trial after a first, short step: its optimizer has all of its state."""
    parallel, workload = plan.parallel, plan.scenario.workload
    short = shortened(plan).scenario.workload
    entry = RunEntry(name=plan.name, plan=plan)
    timer = RecordingTimer(torch.distributed.get_rank(), _DEVICE, recorder=recorder)
    trial = start_trial(entry, short, _data(short), GroupRegistry(), _DEVICE, timer)
    for block in trial.moe_blocks().values():
        if hasattr(block.dispatcher, "balanced"):
            block.dispatcher = replace(block.dispatcher, balanced=True)  # type: ignore[type-var]
    links = trial.runner.links
    trial.runner.links = _InstantLinks(
        links.groups, links.shape, links.dtype, links.device, links.states
    )
    trial.activations._copies = HostCopies(recorder.meter)
    trial.run_step(0)
    trial.workload, trial.dataset = workload, _data(workload)
    trial.set_microbatches(parallel.num_microbatches(workload.global_batch_size))
    return trial


def _data(workload: Workload) -> Any:
    return _NoData(workload.seq_len, workload.global_batch_size)


def _record(trial: Trial, recorder: Recorder) -> RankStep:
    gc.collect()
    recorder.start()
    meter, actions = recorder.meter, trial.runner.actions
    standing = _standing(trial, meter)
    ends = {ActionKind.REDUCE_GRADIENTS, ActionKind.OPTIMIZER_STEP}
    meter.look_at = 1 + next(i for i, a in enumerate(actions) if a.kind in ends)
    meter.weights = lambda: _weights(trial)
    trial.run_step(1)
    gathered = meter.weight_bytes - standing["weights"]
    memory, peak_bytes = memory_by_class(
        standing, meter.boundaries, meter.looked, gathered, actions
    )
    return RankStep(
        rank=torch.distributed.get_rank(),
        stage=trial.groups.coordinates["pp"],
        actions=tuple(map(str, trial.runner.log)),
        calls=tuple(recorder.calls),
        products=dict(recorder.products),
        flops=dict(recorder.flops),
        memory_bytes=memory,
        peak_bytes=peak_bytes,
    )


def _standing(trial: Trial, meter: StorageMeter) -> dict[str, int]:
    """Returns the bytes that stand between two steps, by class, and "constants"."""
    weights = meter.of(_weights(trial))
    constants = meter.of(chain.from_iterable(s.constants() for s in trial.chunks.values()))
    return {
        "weights": weights,
        "constants": constants,
        "optimizer_state": meter.live_bytes - weights - constants,
    }


def _weights(trial: Trial) -> Iterator[Tensor]:
    """Yields the weights and buffers that the modules hold now."""
    for stage in trial.chunks.values():
        yield from stage.parameters()
        yield from stage.buffers()
