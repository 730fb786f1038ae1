"""The loss of a draft head q against a frozen goal p in plain torch (arXiv 2602.23881).

L = mean over tokens of -log sum_x min(p(x), q(x)). The sum is the share of drafts that
speculative decoding accepts: one less the total variation distance.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flopwright.kernels.linear_cross_entropy.reference import logits_part, parts

Side = tuple[Tensor, Tensor, Tensor]  # hidden states [N, H], weight [V, H], log-sum-exp [N]


def lk_loss(logits: Tensor, goal: Tensor) -> Tensor:
    """Returns the mean loss in nats of draft logits [N, V] against the goal's [N, V]."""
    q, p = logits.softmax(-1), goal.softmax(-1)
    return -torch.minimum(p, q).sum(-1).log().mean()


def linear_lk_loss(x: Tensor, weight: Tensor, y: Tensor, goal_weight: Tensor) -> Tensor:
    """Returns the same from hidden states and heads, the logits whole: the oracle of `op.py`."""
    return lk_loss(x @ weight.t(), (y @ goal_weight.t()).detach())


def _probabilities(side: Side, first: int, end: int) -> Tensor:
    x, weight, lse = side
    return (logits_part(x, weight, first, end) - lse.unsqueeze(-1)).exp_()


def overlap(draft: Side, goal: Side) -> tuple[Tensor, Tensor]:
    """Returns (sum of min(p, q), sum of q where q < p), each [N]."""
    shared, below = torch.zeros_like(draft[2]), torch.zeros_like(draft[2])
    for first, end in parts(draft[1].shape[0]):
        q, p = _probabilities(draft, first, end), _probabilities(goal, first, end)
        shared += torch.minimum(p, q).sum(-1)
        below += (q * (q < p)).sum(-1)
    return shared, below


def gradient_part(
    draft: Side, goal: Side, shared: Tensor, below: Tensor, grad: Tensor, first: int, end: int
) -> Tensor:
    """Returns the gradient [N, end - first] of the draft's logits of some columns.

    With A = sum of q where q < p: dL/dz_i = -q_i (1[q_i < p_i] - A) / sum min(p, q).
    """
    q, p = _probabilities(draft, first, end), _probabilities(goal, first, end)
    d = q * (below.unsqueeze(-1) - (q < p).to(q.dtype)) / shared.unsqueeze(-1)
    return d.mul_(grad / q.shape[0]).to(draft[0].dtype)
