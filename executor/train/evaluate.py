"""The loss on held-out text: the same sequences whatever the plan."""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.executor.train.trial import Trial
from flopwright.plan.schedules.actions import Action, ActionKind
from flopwright.plan.schedules.placement import stage_of_chunk


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
    for stage in trial.chunks.values():
        stage.eval()
    for batch, start in zip(mine, first.tolist(), strict=True):
        total += _sum_and_count(trial, batch.to(trial.device), min(size, len(rows) - start))
    for stage in trial.chunks.values():
        stage.train()
    trial.groups.world.sum_(total)
    return float(total[0] / total[1])


def _sum_and_count(trial: Trial, rows: Tensor, valid: int) -> Tensor:
    """Returns (sum of nats, sequences) of one micro-batch on the last chunk, zeros elsewhere."""
    counted = torch.zeros(2, dtype=torch.float64, device=trial.device)
    links, plan, batch = trial.runner.links, trial.plan, trial.micro_batch(rows)
    x = batch.tokens
    for chunk, stage in trial.chunks.items():
        if chunk > 0 and chunk - 1 not in trial.chunks:
            before = stage_of_chunk(plan, chunk - 1)
            x = links.receive(Action(ActionKind.RECV_FORWARD, chunk, peer=before))
        x = stage(x)
        if chunk == plan.num_chunks - 1:
            if valid > 0:
                # Its ranks that share a sequence or a vocabulary count it once together.
                counted[1] = valid / (plan.cp * plan.tp)
                mean = trial.loss(x[:valid], batch.targets[:valid])
                counted[0] = mean.double() * counted[1]
        elif chunk + 1 not in trial.chunks:
            after = stage_of_chunk(plan, chunk + 1)
            links.send(Action(ActionKind.SEND_FORWARD, chunk, peer=after), x)
    links.finish()
    return counted
