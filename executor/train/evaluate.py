"""The loss on held-out text: the same sequences whatever the plan."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from flopwright.executor.train.trial import DTYPES, Trial
from flopwright.models.transformer.module import loss


@torch.no_grad()
def held_out_loss(trial: Trial, max_sequences: int) -> float:
    """Returns the mean nats a token over the held-out sequences; collective over all ranks.

    Every data-parallel rank reads its share of the micro-batches. Ranks that exchange rows
    between experts must pass equally often, so empty places are filled with the first
    sequence and left out of the mean.
    """
    rows = torch.from_numpy(trial.dataset.held_out_sequences(max_sequences))
    size, dp = trial.plan.micro_batch_size, trial.plan.dp
    turns = -(-len(rows) // (size * dp))
    filled = torch.cat([rows, rows[:1].expand(turns * size * dp - len(rows), -1)])
    mine = filled.view(turns, dp, size, -1)[:, trial.groups.coordinates["dp"]]
    first = (torch.arange(turns) * dp + trial.groups.coordinates["dp"]) * size
    total = torch.zeros(2, dtype=torch.float64, device=trial.device)
    trial.stage.eval()
    for batch, start in zip(mine, first.tolist(), strict=True):
        total += _sum_and_count(trial, batch.to(trial.device), min(size, len(rows) - start))
    trial.stage.train()
    trial.groups.world.sum_(total)
    return float(total[0] / total[1])


def _sum_and_count(trial: Trial, rows: Tensor, valid: int) -> Tensor:
    """Returns (sum of nats, sequences) of one micro-batch on the last stage, zeros elsewhere."""
    counted = torch.zeros(2, dtype=torch.float64, device=trial.device)
    pipe, index = trial.groups.pp_forward, trial.groups.coordinates["pp"]
    x = rows[:, :-1].contiguous()
    if index > 0:
        shape = (rows.shape[0], rows.shape[1] - 1, trial.spec.hidden_size)
        dtype = DTYPES[trial.workload.precision.weights]
        x = torch.empty(shape, dtype=dtype, device=trial.device)
        dist.recv(x, src=pipe.ranks[index - 1], group=pipe.handle)
    out = trial.stage(x)
    if index < pipe.size - 1:
        dist.send(out.contiguous(), dst=pipe.ranks[index + 1], group=pipe.handle)
    elif valid > 0:
        counted[0] = loss(out[:valid], rows[:valid, 1:].contiguous()).double() * valid
        counted[1] = valid
    return counted
