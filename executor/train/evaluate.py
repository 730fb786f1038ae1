"""The loss on held-out text: the same sequences whatever the plan."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flopwright.executor.data.token_batch import TokenBatch
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
    rows = trial.dataset.held_out_batch(max_sequences)
    size, dp = trial.plan.micro_batch_size, trial.plan.dp
    turns = -(-len(rows) // (size * dp))
    numbers = np.arange(turns * size * dp)
    numbers[len(rows) :] = 0
    mine = numbers.reshape(turns, dp, size)[:, trial.groups.coordinates["dp"]]
    first = (torch.arange(turns) * dp + trial.groups.coordinates["dp"]) * size
    total = torch.zeros(2, dtype=torch.float64, device=trial.device)
    for stage in trial.chunks.values():
        stage.eval()
    for chosen, start in zip(mine, first.tolist(), strict=True):
        total += _sum_and_count(trial, rows[chosen], min(size, len(rows) - start))
    for stage in trial.chunks.values():
        stage.train()
    trial.groups.world.sum_(total)
    return float(total[0] / total[1])


def _sum_and_count(trial: Trial, rows: TokenBatch, valid: int) -> Tensor:
    """Returns (sum of nats, of weights) of one micro-batch on the last chunk, zeros elsewhere.

    Both are over the tokens of a sequence, so that without weights the second counts sequences.
    """
    counted = torch.zeros(2, dtype=torch.float64, device=trial.device)
    links, plan, batch = trial.runner.links, trial.plan, trial.feed.micro_batch(rows)
    x = batch.tokens
    sums = trial.runner.parts.sums_held
    held: list[Tensor] = []  # finished sums that stand here from one chunk to the next
    for chunk, stage in trial.chunks.items():
        if chunk > 0 and chunk - 1 not in trial.chunks:
            before = stage_of_chunk(plan, chunk - 1)
            x = links.receive(Action(ActionKind.RECV_FORWARD, chunk, peer=before))
        more: dict[str, Any] = {} if batch.documents is None else {"documents": batch.documents}
        if sums and chunk < plan.num_chunks - 1:
            x, *held = stage(x, sums=tuple(held), known=sums[chunk + 1], **more)
        else:
            x = stage(x, sums=tuple(held), **more) if sums else stage(x, **more)
        if chunk == plan.num_chunks - 1:
            if valid > 0:
                # Its ranks that share a sequence or a vocabulary count it once together.
                part = valid / (plan.cp * plan.tp)
                weights = None if batch.weights is None else batch.weights[:valid]
                mean = trial.loss(x[:valid], batch.targets[:valid], weights)
                counted[0] = mean.double() * part
                counted[1] = part if weights is None else weights.double().mean() * part
        elif chunk + 1 not in trial.chunks:
            after = stage_of_chunk(plan, chunk + 1)
            links.send(Action(ActionKind.SEND_FORWARD, chunk, peer=after), x)
    links.finish()
    return counted
