"""Which data-parallel library runs a plan, and clipping over all of its ranks."""

from __future__ import annotations

import torch

from flopwright.executor.parallel.data_parallel.interface import DataParallel, Trainable
from flopwright.executor.parallel.data_parallel.none import ReplicatedDataParallel
from flopwright.executor.parallel.groups import Group
from flopwright.plan.parallel import ParallelPlan


def make_data_parallel(plan: ParallelPlan, trainable: Trainable) -> DataParallel:
    """Returns the plan's data parallelism.

    At ZeRO stage 0, and where a replica is a single rank, there is nothing to cut, and the
    plain all-reduce is the same arithmetic. FSDP2 takes the modules over: from then on the
    parameters are those that the result knows.
    """
    if plan.zero_stage == 0 or trainable.groups.dp_shard.size == 1:
        return ReplicatedDataParallel(trainable, on_host=plan.optimizer_offload)
    if plan.data_parallel == "fsdp2":
        from flopwright.executor.parallel.data_parallel.fsdp2 import FullyShardedDataParallel

        return FullyShardedDataParallel(plan, trainable)
    if plan.zero_stage == 3:
        from flopwright.executor.parallel.data_parallel.deepspeed_stage3 import DeepSpeedZero3

        return DeepSpeedZero3(plan, trainable)
    from flopwright.executor.parallel.data_parallel.deepspeed import DeepSpeedZero

    return DeepSpeedZero(plan, trainable)


def clip_gradients(
    data_parallel: DataParallel, max_norm: float | None, world: Group, trainable: Trainable
) -> torch.Tensor:
    """Clips by the norm over every shard, stage and expert; returns that norm, shape ()."""
    data_parallel.finish_gradients()
    squared = data_parallel.squared_norm()
    with trainable.timer.action("clip_norm", "dp_comm", 8):
        world.sum_(squared)
    norm = squared.sqrt()
    if max_norm is not None:
        data_parallel.scale_gradients(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
