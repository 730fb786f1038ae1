"""Which data-parallel library runs a plan, and clipping over all of its ranks."""

from __future__ import annotations

import torch

from flopwright.executor.parallel.data_parallel.interface import DataParallel, Trainable
from flopwright.executor.parallel.data_parallel.none import ReplicatedDataParallel
from flopwright.executor.parallel.groups import Group
from flopwright.plan.parallel import ParallelPlan


def make_data_parallel(plan: ParallelPlan, trainable: Trainable) -> DataParallel:
    """Returns the plan's data parallelism.

    ZeRO stage 1 over more than one rank is DeepSpeed's. At stage 0, and in a group of one,
    there is nothing to cut, and the plain all-reduce is the same arithmetic.
    """
    if plan.zero_stage == 1 and plan.dp > 1:
        from flopwright.executor.parallel.data_parallel.deepspeed import DeepSpeedZero1

        return DeepSpeedZero1(trainable)
    return ReplicatedDataParallel(trainable)


def clip_gradients(
    data_parallel: DataParallel, max_norm: float | None, world: Group, trainable: Trainable
) -> torch.Tensor:
    """Clips by the norm over every shard, stage and expert; returns that norm, shape ()."""
    squared = data_parallel.squared_norm()
    with trainable.timer.action("clip_norm", "dp_comm", 8):
        world.sum_(squared)
    norm = squared.sqrt()
    if max_norm is not None:
        data_parallel.scale_gradients(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
